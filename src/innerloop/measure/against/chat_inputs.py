"""Our inputs of a Qwen3-VL in the words of transformers: real tokens and patches only, pixels as its processor scales them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from innerloop.kernels.resample import HEAD, Word, resample


def chat_inputs(inputs: Mapping[str, Any], vision: Any) -> dict[str, torch.Tensor]:
    """Plan inputs of one robot -> input_ids, attention_mask, image_grid_thw and pixel_values, on the host.

    vision: transformers' configuration of the tower.
    """
    length, grids = int(inputs["prompt_length"][0]), inputs["grids"].tolist()
    tokens = torch.tensor(inputs["tokens"][:length], dtype=torch.int64)[None]
    shown = [row for row in zip(inputs["frames"], inputs["resizes"], grids, strict=True) if row[2][0]]
    patches = [_patches(frame, words, h * w, vision).view(h * w, -1, 3) for frame, words, (h, w) in shown]
    pixels = torch.cat(patches).transpose(1, 2)[:, :, None].float() / 127.5 - 1.0
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": pixels.expand(-1, -1, vision.temporal_patch_size, -1).reshape(len(pixels), -1),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids if h]),
    }


def _patches(frame: np.ndarray, words: np.ndarray, count: int, vision: Any) -> torch.Tensor:
    """uint8 [1, count, 3 patch^2]. Heads come before tables, so the first table tells how many there are."""
    tables = words[Word.TABLE_X :: HEAD]
    steps = int(tables[np.flatnonzero(tables)[0]]) // HEAD
    given, rows = torch.tensor(frame)[None], torch.tensor(words)[None]
    return resample(given, rows, steps, count, vision.patch_size, vision.spatial_merge_size)
