"""Where prefix and suffix tokens stand: validity, positions and rotary angles, all on the device."""

from dataclasses import dataclass

import torch

ROPE_THETA = 10000.0  # GemmaConfig.rope_theta


@dataclass(frozen=True)
class PrefixLayout:
    """Token order of the flow policies: images in camera order, prompt up to capacity, then the suffix."""

    cameras: int
    tokens_per_camera: int
    capacity: int
    suffix: int
    head_dim: int
    rotary_dtype: torch.dtype = torch.float32

    @property
    def images(self) -> int:
        """Image tokens."""
        return self.cameras * self.tokens_per_camera

    @property
    def prefix(self) -> int:
        """Prefix rows of the K/V cache at the largest capacity."""
        return self.images + self.capacity

    @property
    def keys(self) -> int:
        """Rows of the K/V cache: prefix and suffix."""
        return self.prefix + self.suffix


def validity(layout: PrefixLayout, camera_mask: torch.Tensor, prompt_length: torch.Tensor) -> torch.Tensor:
    """int32 [B, keys]: 1 where a key may be attended to; suffix keys always may."""
    batch, device = camera_mask.shape[0], camera_mask.device
    images = camera_mask.repeat_interleave(layout.tokens_per_camera, dim=1, output_size=layout.images)
    prompt = torch.arange(layout.capacity, device=device)[None] < prompt_length
    suffix = torch.ones(batch, layout.suffix, dtype=torch.int32, device=device)
    return torch.cat([images, prompt.to(torch.int32), suffix], dim=1)


def positions(valid: torch.Tensor) -> torch.Tensor:
    """int32 [B, keys]: padding and absent cameras consume no position (openpi pi0: cumsum(mask) - 1)."""
    return torch.cumsum(valid, dim=1, dtype=torch.int32) - 1


def rotary(position: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [B, T, head_dim / 2], for half-split rotation; the frequencies are rounded to `dtype`."""
    exponent = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim
    frequencies = (1.0 / ROPE_THETA**exponent).to(dtype).to(torch.float32)
    angles = position.to(torch.float32)[..., None] * frequencies
    return torch.cos(angles), torch.sin(angles)
