"""Weight and bias of one product or norm: as parameters, and as names of a checkpoint."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn


def affine(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight [rows, columns] and bias [rows], not initialised."""
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(rows))


def names(pairs: Mapping[str, Sequence[str]], theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """Our parameter names -> theirs, a weight and a bias for each pair; keys and values end before `weight`.

    A value is a string, or several of which the rows follow one another.
    """
    found: dict[str, tuple[str, ...]] = {}
    for mine, parts in pairs.items():
        listed = (parts,) if isinstance(parts, str) else parts
        for kind in ("weight", "bias"):
            found[f"{ours}{mine}{kind}"] = tuple(f"{theirs}{part}{kind}" for part in listed)
    return found
