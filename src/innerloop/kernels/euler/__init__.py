"""The last projection of a flow expert with the Euler step folded in."""

from torch import Tensor

from innerloop.kernels.euler import reference
from innerloop.kernels.select import chosen


def project_and_step(hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float) -> Tensor:
    """hidden [B, T, K], weight [A, K], bias [A], x float32 [B, T, A] -> x + dt * velocity, float32."""
    return chosen(reference.project_and_step, hidden)(hidden, weight, bias, x, dt)
