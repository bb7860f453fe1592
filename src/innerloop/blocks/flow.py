"""Euler flow matching: the times of its steps, their embeddings, and how a chunk is guided.

pi0 and pi0.5 go from noise at t = 1 to actions at t = 0; GR00T and starVLA from 0 to 1, in buckets of time.
"""

import torch

from innerloop.kernels import euler, timestep

MAX_GAIN = 10.0  # LeRobot 0.6.1 RTCConfig.max_guidance_weight
Affine = tuple[torch.Tensor, torch.Tensor]  # weight [N, K] and bias [N]


def times(steps: int, device: torch.device) -> torch.Tensor:
    """float32 [steps + 1]: when each step evaluates its velocity, 1 + i * dt in double precision, then the clean end, 0.

    The end is the time of rows that are given (arXiv:2512.05964, where noise is at 0 and actions are at 1).
    """
    dt = -1.0 / steps
    return torch.tensor([*(1.0 + i * dt for i in range(steps)), 0.0], dtype=torch.float32, device=device)


def at_step(table: torch.Tensor, step: int) -> torch.Tensor:
    """table [steps + 1, ...] -> a view [2, ...]: what rows of this step take, and what rows that are given take."""
    return table[step :: len(table) - 1 - step]


def time_embedding(steps: int, width: int, periods: tuple[float, float], device: torch.device) -> torch.Tensor:
    """float32 [steps + 1, width] sines then cosines of log-spaced periods (openpi create_sinusoidal_pos_embedding)."""
    return timestep.sincos(times(steps, device), width, *periods)


def folded(time: torch.Tensor, inner: Affine, mix: Affine) -> tuple[torch.Tensor, torch.Tensor]:
    """mix [D, 2 D] of (inner [D, A] of an action, time [n, D]) -> [n, D] to add, [D, A] for the action; float64.

    No activation stands between the two products, so the action half of `mix` takes `inner` in.
    """
    (inner_weight, inner_bias), (mix_weight, mix_bias) = ((w.double(), b.double()) for w, b in (inner, mix))
    action_half, time_half = mix_weight.tensor_split(2, dim=1)
    constant = action_half @ inner_bias + mix_bias
    return time.double() @ time_half.T + constant, action_half @ inner_weight


def gains(steps: int, largest: float = MAX_GAIN) -> list[float]:
    """How hard each step is pulled to the previous chunk (arXiv:2506.07339 eq. 2; LeRobot policies/rtc/modeling_rtc.py)."""
    found = []
    for step in range(steps):
        left = 1.0 - step / steps
        passed = 1.0 - left
        gain = largest if passed == 0 else left / passed * (left**2 + passed**2) / left**2
        found.append(min(gain, largest))
    return found


def guided(previous: torch.Tensor, weight: torch.Tensor, prefix: torch.Tensor, step: int, steps: int) -> euler.Guide:
    """What pulls Euler step `step` to previous, float32 [B, chunk, A], by weight [B, chunk]; prefix int32 [B, 1]."""
    return euler.Guide(previous, weight, prefix, gains(steps)[step], 1.0 - step / steps)


def buckets(steps: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 [steps]: the bucket of [0, count) in which each step of an integration from 0 to 1 evaluates its velocity.

    Isaac-GR00T get_action_with_features: int(i / steps * count), in double precision.
    """
    return torch.tensor([int(i / steps * count) for i in range(steps)], dtype=torch.float32, device=device)


def bucket_embedding(buckets: torch.Tensor, width: int) -> torch.Tensor:
    """float32 [N] -> [N, width], sines then cosines (Isaac-GR00T SinusoidalPositionalEncoding).

    In float32 throughout, as trained.
    """
    step = torch.log(torch.tensor(10000.0, device=buckets.device)) / (width // 2)
    exponent = -torch.arange(width // 2, dtype=torch.float32, device=buckets.device) * step
    angles = buckets[:, None] * exponent.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
