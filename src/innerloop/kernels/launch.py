"""How a kernel is launched: the device's real limits, a table an op, tuned choices from a file.

An op describes its candidates once (`Table`). `choose` takes, in this order, a forced choice (while tuning), a tuned
one (from `load`), the row of the device's compute capability, the default; always the first that can launch.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from innerloop.contract.errors import InnerloopError

Shape = tuple[int, ...]
Key = tuple[str, Shape]
"""An op and what its launch depends on."""

SHARED_BYTES = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 110: 232448, 120: 101376}
"""Opt-in shared memory of one block by compute capability (CUDA C++ Programming Guide, technical specifications)."""


@dataclass(frozen=True)
class Limits:
    """What a device can hold: multiprocessors, opt-in shared bytes of one block, bytes of its L2."""

    name: str
    capability: int
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int

    def nearly_full(self, programs: int) -> bool:
        """Whether so many programs leave less than three tenths of the multiprocessors idle."""
        return 10 * programs >= 7 * self.multiprocessors


@dataclass(frozen=True)
class Launch:
    """Warps, pipeline stages and the kernel's compile-time sizes by name; `maxnreg` among them limits registers a thread."""

    warps: int
    stages: int = 1
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, warps: int, stages: int = 1, **sizes: int) -> "Launch":
        """Launch.of(4, 2, BLOCK_M=64)."""
        return cls(warps, stages, tuple(sorted(sizes.items())))

    def __getitem__(self, size: str) -> int:
        return dict(self.sizes)[size]


def _no_shared(launch: Launch, shape: Shape) -> int:
    return 0


def _always(launch: Launch, shape: Shape, limits: Limits) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Table:
    """Candidates of one op, preferred first, by compute capability where measured.

    shared_bytes: what a block of this launch holds. suits: whether a launch makes sense for a shape at all.
    """

    op: str
    default: Sequence[Launch]
    rows: Mapping[int, Sequence[Launch]] = field(default_factory=dict)
    shared_bytes: Callable[[Launch, Shape], int] = _no_shared
    suits: Callable[[Launch, Shape, Limits], bool] = _always


@dataclass(frozen=True)
class Tuned:
    """One result of tuning: the pipeline's milliseconds with the choice that stood and with this one."""

    op: str
    shape: Shape
    launch: Launch
    before_ms: float
    after_ms: float


_tuned: dict[Key, Launch] = {}
_forced: dict[Key, Launch] = {}
_uses: ContextVar[dict[Key, Table] | None] = ContextVar("uses", default=None)
_dependent: ContextVar[bool] = ContextVar("dependent", default=False)


@cache
def limits(device: torch.device) -> Limits:
    """Limits of a CUDA device; of the CPU, where kernels are interpreted, none."""
    if device.type != "cuda":
        return Limits("interpreter", 0, 1, 1 << 40, 1 << 40)
    p: Any = torch.cuda.get_device_properties(device)
    return Limits(
        p.name, p.major * 10 + p.minor, p.multi_processor_count, p.shared_memory_per_block_optin, p.L2_cache_size
    )


def candidates(table: Table, shape: Shape, device_limits: Limits) -> list[Launch]:
    """Every launch of a table that can launch on a device and suits a shape, preferred first, each once."""
    listed = (*table.rows.get(device_limits.capability, ()), *table.default)
    able = [
        launch
        for launch in dict.fromkeys(listed)
        if table.shared_bytes(launch, shape) <= device_limits.shared_bytes and table.suits(launch, shape, device_limits)
    ]
    if not able:
        raise InnerloopError(
            f"kernel '{table.op}' has no launch for shape {shape} within {device_limits.shared_bytes} bytes of shared "
            f"memory on {device_limits.name}; run it with use_kernels('reference')"
        )
    return able


def choose(table: Table, shape: Shape, device: torch.device) -> Launch:
    """The launch of an op for a shape on a device."""
    key = (table.op, shape)
    uses = _uses.get()
    if uses is not None:
        uses[key] = table
    chosen = _forced.get(key) or _tuned.get(key)
    return chosen or _preferred(table, shape, device)


def options(launch: Launch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the Triton call: sizes, warps, stages, and programmatic dependent launch where it is on."""
    pdl = _dependent.get() and limits(device).capability >= 90
    return {**dict(launch.sizes), "num_warps": launch.warps, "num_stages": launch.stages, "PDL": pdl, "launch_pdl": pdl}


@contextmanager
def dependent_launch(when: bool = True) -> Iterator[None]:
    """Kernels launched inside start while their predecessor drains (compute capability 9.0 and up), if `when`.

    They read ahead of its end what they take beside their rows: weights, biases, modulation and gates, rotary tables,
    masks, prefixes. The caller promises that nothing inside writes those, nor the kernel before the first one inside.
    """
    if not when:  # without a look at the variable, which torch.compile cannot trace
        yield
        return
    token = _dependent.set(True)
    try:
        yield
    finally:
        _dependent.reset(token)


def dependent() -> bool:
    """Whether this is inside `dependent_launch`."""
    return _dependent.get()


@contextmanager
def recorded() -> Iterator[dict[Key, Table]]:
    """Collects the table of every (op, shape) that is launched inside."""
    used: dict[Key, Table] = {}
    token = _uses.set(used)
    try:
        yield used
    finally:
        _uses.reset(token)


@contextmanager
def forced(choices: Mapping[Key, Launch]) -> Iterator[None]:
    """Launches these choices inside, whatever table or tuning says."""
    standing = dict(_forced)
    _forced.update(choices)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(standing)


def tune(measure: Callable[[], float], device: torch.device, gain: float = 0.003) -> list[Tuned]:
    """Tries every candidate of every op that `measure` launches, one op at a time, and keeps what wins by `gain`.

    measure: builds the pipeline anew, captured, and returns its milliseconds. Never called on the hot path.
    """
    with recorded() as used:
        best = measure()
    winners: dict[Key, Launch] = {}
    results = []
    for key, table in used.items():
        before = best
        for launch in candidates(table, key[1], limits(device)):
            with forced({**winners, key: launch}):
                measured = measure()
            if measured < best * (1.0 - gain):
                best = measured
                winners[key] = launch
        if key in winners:
            results.append(Tuned(*key, winners[key], before, best))
    _tuned.update(winners)
    return results


def save(path: Path, results: Sequence[Tuned], device: torch.device) -> None:
    """Adds tuning results to a JSON file, under this device's name and these versions."""
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    stamp = _stamp(device)
    kept = {(e["op"], tuple(e["shape"]), *_of(e, stamp)): e for e in entries}
    for r in results:
        sizes = dict(r.launch.sizes)
        entry = {
            **stamp,
            "op": r.op,
            "shape": list(r.shape),
            "launch": {"warps": r.launch.warps, "stages": r.launch.stages, "sizes": sizes},
            "before_ms": round(r.before_ms, 4),
            "after_ms": round(r.after_ms, 4),
        }
        kept[(r.op, r.shape, *stamp.values())] = entry
    path.write_text(json.dumps({"schema": 1, "entries": list(kept.values())}, indent=1) + "\n")


def load(path: Path, device: torch.device) -> int:
    """Takes over the tuned choices of a file that belong to this device and these versions; returns how many."""
    stamp = _stamp(device)
    taken = 0
    for entry in json.loads(path.read_text())["entries"]:
        if _of(entry, stamp) != tuple(stamp.values()):
            continue
        launch = Launch.of(entry["launch"]["warps"], entry["launch"]["stages"], **entry["launch"]["sizes"])
        _tuned[(entry["op"], tuple(entry["shape"]))] = launch
        taken += 1
    return taken


def tuned_file() -> Path:
    """Where `innerloop tune` keeps its choices and loading a policy looks for them."""
    return Path.home() / ".cache" / "innerloop" / "launches.json"


def two_tiles(n: int, least: int = 16) -> tuple[int, int]:
    """Two powers of two from `least` on that together hold n, the second 0 where the first does: 169 -> 128, 64."""
    first = max(least, 1 << (n.bit_length() - 1))
    left = n - first
    return first, max(least, power_of_two(left)) if left > 0 else 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


@cache
def _preferred(table: Table, shape: Shape, device: torch.device) -> Launch:
    return candidates(table, shape, limits(device))[0]


def _stamp(device: torch.device) -> dict[str, Any]:
    own = limits(device)
    return {"device": own.name, "capability": own.capability, "torch": torch.__version__, "triton": version("triton")}


def _of(entry: Mapping[str, Any], stamp: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[k] for k in stamp)
