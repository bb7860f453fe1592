"""uint8 frames to normalised patches, as gather arithmetic: sizes stay on the device."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Placement = Literal["center", "top_left", "bottom_right"]


class _Axis(NamedTuple):
    """Taps of every output coordinate along one axis; all [B, C, size]."""

    first: Tensor
    second: Tensor
    weight: Tensor  # of `second`
    inside: Tensor


def frames_to_patches(
    frames: Tensor, sizes: Tensor, size: int, patch: int, dtype: torch.dtype, placement: Placement = "center"
) -> Tensor:
    """Bilinear without antialias, half-pixel centres, clamped to [0, 1]; the pad is 0 before, -1 after `* 2 - 1`.

    The resized height and width are int(height / ratio) with ratio = max(height, width) / size in fp64, as in
    openpi's resize_with_pad; the odd pixel of a centred pad goes to the bottom and right.
    """
    batch, cameras, _ = frames.shape
    height, width = sizes[..., 0].double(), sizes[..., 1].double()
    ratio = torch.maximum(height, width) / size
    rows = _axis(height, ratio, size, placement)
    columns = _axis(width, ratio, size, placement)
    pitch = sizes[..., 1].long()

    def tap(y: Tensor, x: Tensor) -> Tensor:
        pixel = y[..., :, None] * pitch[..., None, None] + x[..., None, :]
        index = pixel[:, :, None] * 3 + torch.arange(3, device=frames.device)[:, None, None]
        values = frames.gather(2, index.reshape(batch, cameras, -1))
        return values.view(batch, cameras, 3, size, size).float() / 255.0

    wy, wx = rows.weight[:, :, None, :, None], columns.weight[:, :, None, None, :]
    top = (1.0 - wx) * tap(rows.first, columns.first) + wx * tap(rows.first, columns.second)
    bottom = (1.0 - wx) * tap(rows.second, columns.first) + wx * tap(rows.second, columns.second)
    image = ((1.0 - wy) * top + wy * bottom).clamp(0.0, 1.0)
    inside = rows.inside[:, :, None, :, None] & columns.inside[:, :, None, None, :]
    image = torch.where(inside, image, 0.0) * 2.0 - 1.0
    side = size // patch
    grid = image.view(batch, cameras, 3, side, patch, side, patch).permute(0, 1, 3, 5, 2, 4, 6)
    return grid.reshape(batch, cameras, side * side, 3 * patch * patch).to(dtype)


def planes(pixels: Tensor, temporal: int, dtype: torch.dtype) -> Tensor:
    """Every channel of a patch as a plane, `temporal` times, its pixels in [-1, 1]: mean and deviation 0.5."""
    images, patches, _ = pixels.shape
    scaled = (pixels.float() / 127.5 - 1.0).to(dtype)
    channels = scaled.view(images, patches, -1, 3).transpose(2, 3)
    return channels[:, :, :, None].expand(-1, -1, -1, temporal, -1).reshape(images, patches, -1)


def _axis(extent: Tensor, ratio: Tensor, size: int, placement: Placement) -> _Axis:
    resized = torch.clamp((extent / ratio).floor(), 1, size)
    room = size - resized
    pad = (room * {"center": 0.5, "top_left": 0.0, "bottom_right": 1.0}[placement]).floor()
    position = torch.arange(size, device=extent.device) - pad[..., None]
    inside = (position >= 0) & (position < resized[..., None])
    step = (extent.float() / resized.float())[..., None]
    # fp32 operands, one rounding: torch's CPU and CUDA builds contract this line into a fused multiply-add.
    source = (step.double() * (position + 0.5).double() - 0.5).float().clamp_min(0.0)
    last = extent[..., None] - 1
    source = torch.minimum(source, last.float())
    first = source.floor()
    second = torch.minimum(first + 1, last)
    return _Axis(first.long(), second.long(), source - first, inside)
