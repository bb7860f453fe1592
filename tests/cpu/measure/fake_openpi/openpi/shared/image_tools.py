"""Resizing with the aspect kept."""

import torch
import torch.nn.functional as F


def resize_with_pad_torch(images: torch.Tensor, height: int, width: int, mode: str = "bilinear") -> torch.Tensor:
    """float32 [1, H, W, 3] in [-1, 1] -> [height, width, 3]; the batch axis of one image is lost, as in openpi."""
    tall, wide = images.shape[1:3]
    ratio = max(wide / width, tall / height)
    size = (int(tall / ratio), int(wide / ratio))
    small = F.interpolate(images.permute(0, 3, 1, 2), size=size, mode=mode, align_corners=False).clamp(-1, 1)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    padded = F.pad(small, (left, width - size[1] - left, top, height - size[0] - top), value=-1.0)
    return padded.permute(0, 2, 3, 1)[0]
