"""Copies of a state region, pooled: a copy's memory goes back to the pool when nobody refers to it."""

import weakref
from dataclasses import dataclass

import torch

from innerloop.runtime.arena import integrity_word


class Backing:
    """One copy of a state region, never changed once filled, so sessions and capsules may share it."""

    __slots__ = ("__weakref__", "_word", "data")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._word: torch.Tensor | None = None

    @property
    def on_host(self) -> bool:
        """Whether the copy left the arena's device for host memory (always on a CPU)."""
        return not self.data.is_cuda

    def word(self) -> torch.Tensor:
        """The integrity word of the contents when first asked for; waits for nothing."""
        if self._word is None:
            self._word = integrity_word(self.data)
        return self._word

    def intact(self) -> bool:
        """Whether the contents still have their integrity word. Waits for the device."""
        return bool(torch.equal(self.word(), integrity_word(self.data)))


@dataclass(frozen=True)
class Saved:
    """A copy of a session's state region, and the content numbers of the buffers in it."""

    backing: Backing
    contents: tuple[int, ...]


class Pool:
    """Backings for one region, on its device or in host memory (pinned where the region is on CUDA)."""

    def __init__(self, region: torch.Tensor) -> None:
        self._region = region
        self._free: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        self._made = {True: 0, False: 0}

    def copy(self, source: torch.Tensor, host: bool) -> Backing:
        """A backing filled from `source`; on CUDA the copy is only started, in stream order."""
        backing = self.take(host)
        backing.data.copy_(source, non_blocking=True)
        return backing

    def take(self, host: bool) -> Backing:
        """An unfilled backing."""
        host = host or not self._region.is_cuda
        free = self._free[host]
        if free:
            data = free.pop()
        else:
            data = self._allocate(host)
            self._made[host] += 1
        backing = Backing(data)
        weakref.finalize(backing, free.append, data).atexit = False
        return backing

    def account(self) -> dict[str, int]:
        """Bytes allocated and in use, on the device and in host memory."""
        size = self._region.numel()
        return {
            "device": 0 if not self._region.is_cuda else size * self._made[False],
            "device_used": size * (self._made[False] - len(self._free[False])),
            "host": size * self._made[True],
            "host_used": size * (self._made[True] - len(self._free[True])),
        }

    def _allocate(self, host: bool) -> torch.Tensor:
        if not host:
            return torch.empty_like(self._region)
        return torch.empty(self._region.shape, dtype=torch.uint8, pin_memory=self._region.is_cuda)
