"""Recorded experts as tensors, their statistics, and augmentation on the device."""

import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.demo_policy.record import CHUNK, DATA

HELD_OUT = 0.04  # of each task's samples: its last episodes
_SHIFT = 2  # pixels


@dataclass(frozen=True)
class Samples:
    """frames uint8 [N, cameras, 3, H, W], states float32 [N, 4], chunks float32 [N, CHUNK, 4], a prompt each."""

    frames: Tensor
    states: Tensor
    chunks: Tensor
    prompts: list[str]
    held_out: Tensor

    def __len__(self) -> int:
        return len(self.prompts)


def load(folder: Path = DATA) -> Samples:
    """Every recorded task."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise SystemExit(f"{folder} holds no recordings; make them with python -m recipes.demo_policy.record TASK")
    frames, states, chunks, prompts, held = [], [], [], [], []
    for path in paths:
        with np.load(path) as file:
            count = len(file["ends"])
            frames += unpacked(file)
            states.append(file["states"])
            chunks.append(file["chunks"].astype(np.float32))
            prompts += [str(file["prompt"])] * count
            held.append(np.arange(count) >= count * (1 - HELD_OUT))
    together = [torch.from_numpy(np.concatenate(each)) for each in (states, chunks, held)]
    return Samples(torch.from_numpy(np.stack(frames)), together[0], together[1], prompts, together[2])


def unpacked(file: Any) -> list[np.ndarray]:
    """uint8 [cameras, 3, H, W] of every picture of an open recording."""
    packed, ends = file["pictures"].tobytes(), [0, *file["ends"].tolist()]
    return [_unpack(packed[start:end]) for start, end in itertools.pairwise(ends)]


def _unpack(picture: bytes) -> np.ndarray:
    both = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    size = both.shape[0]
    return np.stack([both[:, start : start + size] for start in range(0, both.shape[1], size)]).transpose(0, 3, 1, 2)


def statistics(samples: Samples) -> dict[str, dict[str, Tensor]]:
    """What a LeRobot dataset says of itself: mean, std, min, max and quantiles of state and action."""
    result = {}
    for key, values in (("observation.state", samples.states), ("action", samples.chunks.reshape(-1, 4))):
        spans = {
            f"q{percent:02d}": torch.quantile(values[:500_000], percent / 100, dim=0) for percent in (1, 10, 90, 99)
        }
        plain = {"mean": values.mean(0), "std": values.std(0), "min": values.amin(0), "max": values.amax(0)}
        result[key] = plain | spans
    return result


def augmented(frames: Tensor) -> Tensor:
    """uint8 [B, cameras, 3, H, W] to float 0..1: shifted by a pixel or two, other light, noise."""
    batch, cameras, _, size, _ = frames.shape
    device, groups = frames.device, batch * cameras
    images = frames.reshape(groups, 3, size, size)
    move = torch.randint(-_SHIFT, _SHIFT + 1, (2, groups, 1), device=device)
    rows, columns = ((torch.arange(size, device=device) + move).clamp(0, size - 1)).unbind(0)
    each = torch.arange(groups, device=device)
    moved = images[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float() / 255
    light = 1 + 0.1 * torch.randn(groups, 1, 1, 1, device=device)
    colour = 1 + 0.05 * torch.randn(groups, 3, 1, 1, device=device)
    offset = 0.03 * torch.randn(groups, 1, 1, 1, device=device)
    noise = 0.01 * torch.randn_like(moved)
    return (moved * light * colour + offset + noise).clamp(0, 1).reshape(batch, cameras, 3, size, size)


__all__ = ["CHUNK", "DATA", "Samples", "augmented", "load", "statistics", "unpacked"]
