"""Linear layers of many rows: cuBLASLt's, with the epilogue it has."""

from torch import Tensor

from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.linear import reference
from innerloop.kernels.select import chosen


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """activation(x [..., K] @ weight [N, K]^T + bias [N]) -> [..., N]."""
    return chosen(reference.linear, x)(x, weight, bias, activation)
