"""Sinusoidal embedding of a scalar time."""

import math

import torch
from torch import Tensor


def sincos(t: Tensor, dim: int, min_period: float, max_period: float, cos_first: bool = False) -> Tensor:
    """Angles in fp64, because a period of 4e-3 turns fp32's rounding of 2 pi t / period into visible phase."""
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=t.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = t.double()[:, None] * (2.0 * math.pi / period)
    halves = (angle.cos(), angle.sin()) if cos_first else (angle.sin(), angle.cos())
    return torch.cat(halves, dim=-1).float()
