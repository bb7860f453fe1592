"""The last projection, the solver's update, and what a previous chunk does to it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.activation.reference import Activation, activate


class Guide(NamedTuple):
    """How a previous chunk, float32 [B, T, A], acts on a step.

    It pulls by weight, float32 [B, T], with the step's gain and time; its first prefix[b] rows, int32 [B, 1], stand.
    """

    previous: Tensor
    weight: Tensor
    prefix: Tensor
    gain: float
    time: float


def project_in(
    x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, activation: Activation | None = None
) -> Tensor:
    """activation(x W^T + b) in fp32, rounded to dtype."""
    y = F.linear(x.float(), weight.float(), bias.float())
    return (y if activation is None else activate(y, activation)).to(dtype)


def project_and_step(
    hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float, hold: Tensor | None = None
) -> Tensor:
    """x + dt * (hidden W^T + b), all in fp32, and as much of x as `hold` says."""
    moved = x + dt * F.linear(hidden.float(), weight.float(), bias.float())
    return moved if hold is None else torch.lerp(moved, x, hold[..., None])


def impose(x: Tensor, previous: Tensor, prefix: Tensor) -> Tensor:
    """The first prefix[b] rows from `previous`, the others from x."""
    below = torch.arange(x.shape[1], device=x.device) < prefix.view(-1, 1)
    return torch.where(below[..., None], previous, x)


def guide(
    x: Tensor, moved: Tensor, previous: Tensor, weight: Tensor, prefix: Tensor, gain: float, time: float, dt: float
) -> Tensor:
    """moved - dt * gain * weight * (previous - (x - time * (moved - x) / dt)), then `previous` in its given rows."""
    foreseen = x - (time / dt) * (moved - x)
    return impose(moved - (dt * gain) * weight[..., None] * (previous - foreseen), previous, prefix)
