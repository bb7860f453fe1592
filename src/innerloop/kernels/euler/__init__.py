"""The last projection of a flow expert with the Euler step folded in, and real-time chunking: its pull, its given rows."""

from torch import Tensor

from innerloop.kernels.euler import reference
from innerloop.kernels.euler.reference import Guide
from innerloop.kernels.select import chosen

__all__ = ["Guide", "guide", "impose", "project_and_step"]


def project_and_step(hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float) -> Tensor:
    """hidden [B, T, K], weight [A, K], bias [A], x float32 [B, T, A] -> x + dt * velocity, float32."""
    return chosen(reference.project_and_step, hidden)(hidden, weight, bias, x, dt)


def impose(x: Tensor, previous: Tensor, prefix: Tensor) -> Tensor:
    """x float32 [B, T, A] with its first prefix[b] rows those of `previous`; prefix int32 [B] or [B, 1]."""
    return chosen(reference.impose, x)(x, previous, prefix)


def guide(
    x: Tensor, moved: Tensor, previous: Tensor, weight: Tensor, prefix: Tensor, gain: float, time: float, dt: float
) -> Tensor:
    """The step x -> moved pulled towards `previous` (LeRobot policies/rtc/modeling_rtc.py), then `impose`d on.

    Weight 0 and prefix 0 keep it as it is. All float32, x, moved and previous [B, T, A], weight [B, T]: moved - dt * gain * weight * (previous - (x - time * v)),
    where v = (moved - x) / dt is the step's velocity, so that x - time * v is the chunk it foresees.
    """
    return chosen(reference.guide, x)(x, moved, previous, weight, prefix, gain, time, dt)
