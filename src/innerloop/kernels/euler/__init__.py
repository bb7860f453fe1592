"""The first and last projection of a flow expert, the Euler step in the last, and real-time chunking: its pull, its given rows."""

import torch
from torch import Tensor

from innerloop.kernels.activation import Activation
from innerloop.kernels.euler import reference
from innerloop.kernels.euler.reference import Guide
from innerloop.kernels.select import chosen

__all__ = ["Guide", "guide", "impose", "project_and_step", "project_in"]


def project_in(
    x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, activation: Activation | None = None
) -> Tensor:
    """x float32 [B, T, A], weight [K, A], bias [K] -> activation(x W^T + b) [B, T, K] in dtype, summed in fp32."""
    return chosen(reference.project_in, x)(x, weight, bias, dtype, activation)


def project_and_step(
    hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float, hold: Tensor | None = None
) -> Tensor:
    """hidden [B, T, K], weight [A, K], bias [A], x float32 [B, T, A] -> x + dt * velocity, float32.

    hold float32 [B, T]: how much of x a row keeps, 0 to 1; within `launch.dependent_launch` it is read ahead.
    """
    return chosen(reference.project_and_step, hidden)(hidden, weight, bias, x, dt, hold)


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
