"""Element-wise activations and gated linear units, in fp32."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu_tanh", "gelu", "silu", "relu", "relu2"]


def activate(x: Tensor, kind: Activation) -> Tensor:
    """One activation by name; the result has the dtype of x."""
    return _apply(x.float(), kind).to(x.dtype)


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
