"""Sinusoidal time embedding of flow and diffusion solvers."""

from torch import Tensor

from innerloop.kernels.select import chosen
from innerloop.kernels.timestep import reference


def sincos(t: Tensor, dim: int, min_period: float, max_period: float, cos_first: bool = False) -> Tensor:
    """t float32 [N] -> float32 [N, dim]: sin then cos of 2 pi t / period, periods geometric between the two ends.

    pi0 has periods 4e-3 .. 4; diffusers' Timesteps(shift 1) is 2 pi .. 2 pi 1e4 with `cos_first`.
    """
    return chosen(reference.sincos, t)(t, dim, min_period, max_period, cos_first)
