"""A model that has the parameters a test says, keeps what it is given, and answers with one of its weights in it."""

from typing import ClassVar

import torch
from torch import nn

from openpi.models.model import Observation
from openpi.models.pi0_config import Pi0Config


class PI0Pytorch(nn.Module):
    """shapes: of every parameter; complaint: of the constructor, as openpi has it for an unpatched transformers."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    complaint: ClassVar[str | None] = None

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        torch.set_float32_matmul_precision("high")
        if self.complaint is not None:
            raise ValueError(self.complaint)
        self.config = config
        for name, shape in self.shapes.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            dtype = torch.float32 if "norm" in name or config.dtype == "float32" else torch.bfloat16
            owner.register_parameter(leaf, nn.Parameter(torch.full(shape, torch.nan, dtype=dtype)))

    def sample_actions(
        self, device: torch.device, observation: Observation, noise: torch.Tensor | None = None, num_steps: int = 10
    ) -> torch.Tensor:
        """[B, horizon, action_dim]."""
        self.given = (device, observation, noise, num_steps)
        assert noise is not None
        return noise + self.get_submodule("action_out_proj").bias.float()
