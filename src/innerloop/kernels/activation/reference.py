"""Element-wise activations and gated linear units, in fp32."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.norm.reference import by_token

Activation = Literal["gelu_tanh", "gelu", "silu", "relu", "relu2"]


def activate(x: Tensor, kind: Activation, bias: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """One activation by name, of x + bias in fp32; the result has the dtype of x."""
    y = x.float()
    if bias is not None:
        y = y + (bias if prefix is None else by_token(bias, prefix, x.shape[1])).float()
    return _apply(y, kind).to(x.dtype)


def glu(gate_up: Tensor, kind: Activation) -> Tensor:
    """activation(first half) * second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_apply(gate, kind) * up).to(gate_up.dtype)


def _apply(x: Tensor, kind: Activation) -> Tensor:
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.relu(x).square()
