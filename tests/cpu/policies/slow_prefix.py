"""Trained-prefix sampling written out: one robot, float64, every token with its own time, no tables and no caches.

Shares with the policies their parameters and, of a decision already made, K/V, validity and positions of the prefix.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop.blocks.prefix import ROPE_THETA

Buffers = Mapping[str, Tensor]


def sample(model: nn.Module, b: Buffers, row: int, noise: Tensor, given: Tensor, length: int) -> Tensor:
    """noise and given [chunk, A], the first `length` rows of `given` clean -> [chunk, A]."""
    x, steps, below = noise.double(), model.config.steps, torch.arange(len(noise)) < length
    for step in range(steps):
        x = torch.where(below[:, None], given.double(), x)
        time = torch.where(below, 0.0, 1.0 - step / steps).double()
        x = x - _velocity(model, b, row, x, time) / steps
    return torch.where(below[:, None], given.double(), x)


def _velocity(model: nn.Module, b: Buffers, row: int, x: Tensor, time: Tensor) -> Tensor:
    p = {name: value.double() for name, value in model.named_parameters()}
    embedded = _sines(time, len(p["action_in_bias"]), model.config.periods)
    entered = x @ p["action_in_weight"].T + p["action_in_bias"]
    norms = 2 * model.config.expert.depth + 1
    if "modulation_weight" in p:
        inner = F.silu(embedded @ p["time_in_weight"].T + p["time_in_bias"])
        condition = F.silu(inner @ p["time_out_weight"].T + p["time_out_bias"])
        modulation = (condition @ p["modulation_weight"].T + p["modulation_bias"]).view(len(x), norms, 3, -1)
        h = entered
    else:
        both = torch.cat([entered, embedded], dim=1)
        h = F.silu(both @ p["mix_in_weight"].T + p["mix_in_bias"]) @ p["mix_out_weight"].T + p["mix_out_bias"]
        scale = p["expert_norms"].view(1, norms, -1).expand(len(x), -1, -1)
        modulation = torch.stack([scale, torch.zeros_like(scale), torch.ones_like(scale)], dim=2)
    for i in range(model.config.expert.depth):
        weights = {n: p[f"expert.layers.{i}.{n}_weight"] for n in ("qkv", "out", "gate_up", "down")}
        qkv = _normed(h, modulation[:, 2 * i]) @ weights["qkv"].T
        h = h + modulation[:, 2 * i, 2] * (_attended(model, b, row, i, qkv) @ weights["out"].T)
        gate, up = (_normed(h, modulation[:, 2 * i + 1]) @ weights["gate_up"].T).chunk(2, dim=1)
        h = h + modulation[:, 2 * i + 1, 2] * ((F.gelu(gate, approximate="tanh") * up) @ weights["down"].T)
    return _normed(h, modulation[:, -1]) @ p["action_out_weight"].T + p["action_out_bias"]


def _sines(time: Tensor, width: int, periods: tuple[float, float]) -> Tensor:
    low, high = periods
    columns = [low * (high / low) ** (i / (width // 2 - 1)) for i in range(width // 2)]
    angle = time[:, None] * (2 * math.pi / torch.tensor(columns, dtype=torch.float64))
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def _normed(h: Tensor, modulation: Tensor) -> Tensor:
    return h / (h.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + modulation[:, 0]) + modulation[:, 1]


def _attended(model: nn.Module, b: Buffers, row: int, layer: int, qkv: Tensor) -> Tensor:
    sizes, tokens = model.config.expert, len(qkv)
    heads, dim = sizes.heads, sizes.head_dim
    q, k, v = qkv.view(tokens, -1, dim).split([heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    position = b["positions"][row, -tokens:].double()
    q, k = _rotated(q, position), _rotated(k, position)
    seen = b["key_valid"][row, : b["keys"].shape[2]] != 0
    keys, values = (b[name][layer, row].double()[seen] for name in ("keys", "values"))
    if "state_keys" in b:
        k, v = (torch.cat([b[f"state_{n}"][layer, row].double(), t]) for n, t in (("keys", k), ("values", v)))
    keys, values = torch.cat([keys, k]), torch.cat([values, v])
    mixed = []
    for head in range(heads):
        own = head * sizes.kv_heads // heads
        mixed.append(torch.softmax(q[:, head] @ keys[:, own].T / dim**0.5, dim=1) @ values[:, own])
    return torch.cat(mixed, dim=1)


def _rotated(x: Tensor, position: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = position[:, None] / ROPE_THETA ** (torch.arange(half, dtype=torch.float64) / half)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)
