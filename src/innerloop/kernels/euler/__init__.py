"""The last projection of a flow expert with the Euler step folded in, and the pull of real-time chunking."""

from torch import Tensor

from innerloop.kernels.euler import reference
from innerloop.kernels.euler.reference import Guide
from innerloop.kernels.select import chosen

__all__ = ["Guide", "guide", "project_and_step"]


def project_and_step(hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float) -> Tensor:
    """hidden [B, T, K], weight [A, K], bias [A], x float32 [B, T, A] -> x + dt * velocity, float32."""
    return chosen(reference.project_and_step, hidden)(hidden, weight, bias, x, dt)


def guide(x: Tensor, moved: Tensor, previous: Tensor, weight: Tensor, gain: float, time: float, dt: float) -> Tensor:
    """The step x -> moved pulled towards `previous` (LeRobot policies/rtc/modeling_rtc.py); weight 0 keeps it as it is.

    All float32, x, moved and previous [B, T, A], weight [B, T]: moved - dt * gain * weight * (previous - (x - time * v)),
    where v = (moved - x) / dt is the step's velocity, so that x - time * v is the chunk it foresees.
    """
    return chosen(reference.guide, x)(x, moved, previous, weight, gain, time, dt)
