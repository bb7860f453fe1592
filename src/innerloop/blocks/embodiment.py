"""Linear layers with weights of their own for every embodiment; a session reads one slice (Isaac-GR00T CategorySpecificLinear)."""

import torch
from torch import nn


class EmbodimentLinear(nn.Module):
    """weight [E, in, out] and bias [E, out], as checkpoints store them."""

    def __init__(self, embodiments: int, inner: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(embodiments, inner, out))
        self.bias = nn.Parameter(torch.empty(embodiments, out))

    def of(self, embodiment: int) -> tuple[torch.Tensor, torch.Tensor]:
        """weight [out, in] and bias [out] of one embodiment, as kernels.linear reads them."""
        return self.weight[embodiment].T, self.bias[embodiment]


def names(theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """Names of one layer: `theirs` and `ours` end before the dot."""
    return {f"{ours}.weight": (f"{theirs}.W",), f"{ours}.bias": (f"{theirs}.b",)}
