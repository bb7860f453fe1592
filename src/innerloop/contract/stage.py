"""A function over named buffers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """`run(buffers)` reads and writes in place, only what it declares.

    `prepare` marks work of the checkpoint clock: it runs once at load and is never captured.
    """

    name: str
    run: Callable[[Tensors], None] = field(repr=False)
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    prepare: bool = False
