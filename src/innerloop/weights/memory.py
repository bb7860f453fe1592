"""What will be allocated, by name and purpose, known and checked before anything is."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from innerloop.contract.errors import MemoryPlanError
from innerloop.weights import cgroup

HEADROOM = 1 << 30  # bytes left free: on a board with unified memory the operating system needs some of it too


class MemoryRow(NamedTuple):
    """One allocation to come: bytes, and what it is for (weights, static, state, scratch, ...)."""

    name: str
    bytes: int
    role: str


@dataclass(frozen=True)
class MemoryPlan:
    """Allocations to come. `str(plan)` is a table by role, with the largest allocations of each."""

    rows: tuple[MemoryRow, ...]

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, str]]) -> "MemoryPlan":
        """From (name, bytes, role)."""
        return cls(tuple(MemoryRow(*row) for row in rows))

    @property
    def total(self) -> int:
        """Sum of all rows, bytes."""
        return sum(row.bytes for row in self.rows)

    def by_role(self) -> dict[str, int]:
        """Bytes by role, in order of first appearance."""
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[row.role] = totals.get(row.role, 0) + row.bytes
        return totals

    def check(self, cap_bytes: int | None = None, free_bytes: int | None = None) -> None:
        """Raise MemoryPlanError, with the plan, when it exceeds the cap or the free memory less 1 GiB."""
        if cap_bytes is not None and self.total > cap_bytes:
            raise MemoryPlanError(
                f"the memory plan needs {_size(self.total)}, over the cap of {_size(cap_bytes)}; "
                f"nothing was allocated. Raise the cap or ask for a smaller precision\n{self}"
            )
        if free_bytes is not None and self.total > free_bytes - HEADROOM:
            raise MemoryPlanError(
                f"the memory plan needs {_size(self.total)}, but {_size(free_bytes)} are free and "
                f"{_size(HEADROOM)} stay in reserve; nothing was allocated. "
                f"Free memory or ask for a smaller precision\n{self}"
            )

    def __str__(self) -> str:
        return "\n".join(f"{name:<44}{size:>12}" for name, size in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        for role, total in self.by_role().items():
            rows = sorted((r for r in self.rows if r.role == role), key=lambda r: r.bytes, reverse=True)
            yield f"{role} ({len(rows)})", _size(total)
            for row in rows[:3] if len(rows) > 1 else ():
                yield f"  {row.name}", _size(row.bytes)
        yield "total", _size(self.total)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; for the CPU what Linux calls available and a container's limit leaves, None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min((found for found in (_available(), cgroup.left()) if found is not None), default=None)


def _available() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _size(count: int) -> str:
    if count < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB"
    if count < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.2f} GiB"
