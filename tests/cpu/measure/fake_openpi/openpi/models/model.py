"""What openpi's models are given."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Observation:
    """A batch: images float32 [B, H, W, 3] in [-1, 1], masks bool [B], state [B, S], tokens and their mask [B, L]."""

    images: dict[str, torch.Tensor]
    image_masks: dict[str, torch.Tensor]
    state: torch.Tensor
    tokenized_prompt: torch.Tensor | None = None
    tokenized_prompt_mask: torch.Tensor | None = None
    token_ar_mask: torch.Tensor | None = None
    token_loss_mask: torch.Tensor | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Observation":
        """From nested names."""
        prompt = {name: data.get(name) for name in ("tokenized_prompt", "tokenized_prompt_mask")}
        return cls(data["image"], data["image_mask"], data["state"], **prompt)
