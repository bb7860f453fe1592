"""Element-wise activations and gated linear units: [..., N] in, same dtype out, fp32 inside."""

from torch import Tensor

from innerloop.kernels.activation import reference
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.select import chosen, unfused

__all__ = ["Activation", "activate", "glu", "silu"]


def activate(x: Tensor, kind: Activation, bias: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """One activation by name, of x + bias [N]; with prefix int32 [B] or [B, 1] of x [B, T, N] and bias [2, N].

    The first prefix[b] tokens of entry b then take row 1 of the bias, the others row 0.
    """
    return chosen(reference.activate, x)(x, kind, bias, prefix)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return activate(x, "silu")


def glu(gate_up: Tensor, kind: Activation) -> Tensor:
    """gate_up [..., 2F] -> activation(gate) * up [..., F]; the gate is the first half."""
    if unfused(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, kind) * up
    return chosen(reference.glu, gate_up)(gate_up, kind)
