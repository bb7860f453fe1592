"""Euler flow matching from noise (t = 1) to actions (t = 0), as pi0 and pi0.5 integrate it."""

import torch

from innerloop.kernels import timestep


def times(steps: int, device: torch.device) -> torch.Tensor:
    """float32 [steps]: the time at which each step evaluates its velocity, 1 + i * dt in double precision."""
    dt = -1.0 / steps
    return torch.tensor([1.0 + i * dt for i in range(steps)], dtype=torch.float32, device=device)


def time_embedding(steps: int, width: int, periods: tuple[float, float], device: torch.device) -> torch.Tensor:
    """float32 [steps, width] sines then cosines of log-spaced periods (openpi create_sinusoidal_pos_embedding)."""
    return timestep.sincos(times(steps, device), width, *periods)
