"""Hidden states of several layers, each by a layer norm and a product of its own, into another width (starVLA QwenPI_v3)."""

from collections.abc import Sequence

import torch
from torch import nn

from innerloop.blocks import affine
from innerloop.kernels import linear, norm

EPS = 1e-5  # torch.nn.LayerNorm's default


class Projections(nn.Module):
    """All layers' norms and products, stacked along the first axis."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(layers * columns))
        self.norm_bias = nn.Parameter(torch.empty(layers * columns))
        self.weight, self.bias = affine.affine(layers * rows, columns)

    def forward(self, read: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, T, columns] of each layer -> [layers, B, T, rows], all norms in one kernel, all products in another."""
        layers = len(read)
        weight, bias = self.norm_weight.view(layers, -1), self.norm_bias.view(layers, -1)
        normed = norm.layer_norms(read, weight, bias, EPS)
        projected = linear.batched(normed.flatten(1, 2), self.weight, self.bias)
        return projected.view(layers, *read[0].shape[:2], -1)


def names(layers: Sequence[int], theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """Our parameter names -> theirs, in the layers' order; `theirs` ends before a layer's number."""
    parts = {"norm_": 0, "": 1}  # the places in the sequence of each layer
    return affine.names({p: tuple(f"{i}.{at}." for i in layers) for p, at in parts.items()}, theirs, ours)
