"""A named tensor at a fixed address, and what it is for."""

import enum
import math
from dataclasses import dataclass

import torch


class Role(enum.StrEnum):
    """Who may write a buffer, and how long its value lives."""

    INPUT = "input"  # a window the host writes
    STATIC = "static"  # prepared from weights, prompt or schedule; then only read
    STATE = "state"  # survives decisions: K/V, history
    SCRATCH = "scratch"  # meaningless once the stages that read it have run
    OUTPUT = "output"  # a window the host reads


@dataclass(frozen=True)
class Buffer:
    """name, shape and dtype are fixed for the life of a plan; the address comes from the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize
