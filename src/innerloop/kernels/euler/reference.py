"""The last projection, the solver's update, and the pull towards a previous chunk."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Guide(NamedTuple):
    """How a step is pulled: previous float32 [B, T, A], weight float32 [B, T], the step's gain and time."""

    previous: Tensor
    weight: Tensor
    gain: float
    time: float


def project_and_step(hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float) -> Tensor:
    """x + dt * (hidden W^T + b), all in fp32."""
    return x + dt * F.linear(hidden.float(), weight.float(), bias.float())


def guide(x: Tensor, moved: Tensor, previous: Tensor, weight: Tensor, gain: float, time: float, dt: float) -> Tensor:
    """moved - dt * gain * weight * (previous - (x - time * (moved - x) / dt))."""
    foreseen = x - (time / dt) * (moved - x)
    return moved - (dt * gain) * weight[..., None] * (previous - foreseen)
