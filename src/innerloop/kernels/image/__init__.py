"""Camera frames to the patches a vision tower embeds."""

import torch
from torch import Tensor

from innerloop.kernels.image import reference
from innerloop.kernels.image.reference import Placement
from innerloop.kernels.select import chosen

__all__ = ["Placement", "frames_to_patches", "planes"]


def frames_to_patches(
    frames: Tensor, sizes: Tensor, size: int, patch: int, dtype: torch.dtype, placement: Placement = "center"
) -> Tensor:
    """frames uint8 [B, C, capacity] (HWC RGB, the rest undefined), sizes int32 [B, C, 2] (height, width)
    -> [B, C, (size / patch)^2, 3 patch^2] in [-1, 1], each patch in the order channel, row, column.

    Resizes with the aspect kept and pads with -1; `placement` says where the image lies. Reads sizes on the device.
    """
    return chosen(reference.frames_to_patches, frames)(frames, sizes, size, patch, dtype, placement)


def planes(pixels: Tensor, temporal: int, dtype: torch.dtype) -> Tensor:
    """pixels uint8 [I, P, 3 p^2] (row, column, channel) -> [I, P, 3 temporal p^2] (channel, frame, row, column) in [-1, 1].

    As Qwen3-VL's patch embedding reads a picture: the same frame `temporal` times.
    """
    return chosen(reference.planes, pixels)(pixels, temporal, dtype)
