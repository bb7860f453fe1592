"""Our inputs of a Qwen3-VL in the words of transformers: real tokens and patches only, pixels as its processor scales them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def chat_inputs(inputs: Mapping[str, Any], temporal: int) -> dict[str, torch.Tensor]:
    """Plan inputs of one robot -> input_ids, attention_mask, image_grid_thw and pixel_values, on the host.

    temporal: frames of a patch, in each of which an image is repeated.
    """
    length, grids = int(inputs["prompt_length"][0]), inputs["grids"]
    tokens = torch.tensor(inputs["tokens"][:length], dtype=torch.int64)[None]
    patches = [p.reshape(h * w, -1, 3) for p, (h, w) in zip(inputs["pixels"], grids, strict=True) if h]
    pixels = torch.from_numpy(np.concatenate(patches)).transpose(1, 2)[:, :, None].float() / 127.5 - 1.0
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": pixels.expand(-1, -1, temporal, -1).reshape(len(pixels), -1),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids.tolist() if h]),
    }
