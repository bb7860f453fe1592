"""Tensors of a checkpoint stream into their final buffers, strictly, and the digest is taken on the way."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

import torch

from innerloop.contract.errors import CheckpointError
from innerloop.weights.identity import TensorDigest
from innerloop.weights.source import TensorSource

Progress = Callable[[int, int], None]

_PIECE = 64 << 20  # bytes copied at once, so that a change of dtype on a device needs no more scratch than this
_QUIET = 2.0  # seconds before the first progress report, and between two of them


@dataclass(frozen=True)
class NameTable:
    """How a checkpoint's names become ours.

    targets: our name -> the checkpoint names laid into it one after the other along dim 0;
    ties: checkpoint name -> the name to read when it is absent;
    prefixes: (historic, current), applied in order to every checkpoint name;
    ignored: glob patterns of tensors known to be unused. All but `prefixes` use current names.
    """

    targets: Mapping[str, tuple[str, ...]]
    ties: Mapping[str, str]
    prefixes: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class Account:
    """What happened to every tensor: names as stored. bytes: as stored; digest: of all stored content, sha256."""

    loaded: tuple[str, ...]
    tied: tuple[str, ...]
    renamed: tuple[str, ...]
    ignored: tuple[str, ...]
    merged: Mapping[str, str]
    bytes: int
    seconds: float
    digest: str

    def __str__(self) -> str:
        merged = ", ".join(sorted(set(self.merged.values())))
        return (
            f"weights: {len(self.loaded)} loaded, {len(self.tied)} tied, {len(self.renamed)} renamed, "
            f"{len(self.ignored)} ignored, {len(self.merged)} merged{f' ({merged})' if merged else ''}; "
            f"{self.bytes / 1e9:.3f} GB in {self.seconds:.1f} s, digest {self.digest[:12]}"
        )


class _Copy(NamedTuple):
    target: str
    start: int  # first row in the target
    rows: int


def load_weights(
    parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    table: NameTable,
    *,
    progress: Progress | None = None,
) -> Account:
    """Fill `parameters` in place, in their own dtypes and on their own devices, one tensor in host memory at a time.

    Every missing, unexpected or misshapen tensor is named in one CheckpointError before a weight is read.
    `progress(done, total)` is called with bytes every two seconds.
    """
    started = time.monotonic()
    layout = _fitting(parameters, source, table)
    total = sum(source.info(name).bytes for name in source.names())
    report = _throttled(progress, total)
    done = 0
    with torch.no_grad(), TensorDigest() as digest:
        for name in source.names():
            tensor = source.read(name, digest.add)
            for copy in layout.copies.get(name, ()):
                _copy_rows(parameters[copy.target], tensor, copy)
            digest.wait()
            done += source.info(name).bytes
            report(done)
        identity = digest.hexdigest()
    return Account(
        loaded=tuple(name for name in source.names() if name in layout.copies),
        tied=tuple(layout.tied),
        renamed=layout.renamed,
        ignored=layout.ignored,
        merged=source.merged,
        bytes=total,
        seconds=time.monotonic() - started,
        digest=identity,
    )


def check_weights(
    parameters: Mapping[str, torch.Tensor], source: TensorSource, table: NameTable, sizes: Mapping[str, int]
) -> None:
    """Raise what `load_weights` would, from headers alone: before anything is allocated, on meta tensors.

    `sizes` (config field -> value) lets that error name the field which the tensors contradict.
    """
    _fitting(parameters, source, table, sizes)


def _fitting(
    parameters: Mapping[str, torch.Tensor],
    source: TensorSource,
    table: NameTable,
    sizes: Mapping[str, int] | None = None,
) -> "_Layout":
    layout = _Layout(parameters, source, table, sizes or {})
    if layout.problems:
        raise CheckpointError(
            f"the weights do not fit the model that the config describes ({len(layout.problems)} problems); "
            "nothing was loaded:\n  " + "\n  ".join(layout.problems)
        )
    return layout


def current_name(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """A stored name with every historic prefix that it has replaced, in order."""
    for historic, current in prefixes:
        if name.startswith(historic):
            name = current + name.removeprefix(historic)
    return name


class _Layout:
    """Where every stored tensor goes, and everything that is wrong with that."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        source: TensorSource,
        table: NameTable,
        sizes: Mapping[str, int],
    ) -> None:
        self._source, self._table, self._sizes = source, table, sizes
        self.copies: dict[str, list[_Copy]] = {}
        self.tied: dict[str, None] = {}
        self.problems = [
            f"parameter '{n}' has no entry in the name table" for n in parameters if n not in table.targets
        ]
        self._stored = self._current_names()
        for target, parts in table.targets.items():
            names = [self._find(part) for part in parts]
            found = [name for name in names if name is not None]
            if target not in parameters:
                self.problems.append(f"the name table fills '{target}', which the model does not have")
            elif len(found) == len(parts):
                self._place(target, parameters[target], found)
        self.renamed = tuple(f"{name} -> {current}" for current, name in self._stored.items() if name != current)
        self.ignored = self._leftovers()

    def _current_names(self) -> dict[str, str]:
        stored: dict[str, str] = {}
        for name in self._source.names():
            current = current_name(name, self._table.prefixes)
            if current in stored:
                self.problems.append(
                    f"duplicate: '{name}' and '{stored[current]}' are the same tensor '{current}', one is stale"
                )
            stored[current] = name
        return stored

    def _find(self, part: str) -> str | None:
        if part in self._stored:
            return self._stored[part]
        tie = self._table.ties.get(part)
        if tie in self._stored:
            self.tied[f"{part} <- {self._stored[tie]}"] = None
            return self._stored[tie]
        self.problems.append(f"missing: '{part}'" + (f", nor its tied '{tie}'" if tie else ""))
        return None

    def _place(self, target: str, parameter: torch.Tensor, names: list[str]) -> None:
        expected = tuple(parameter.shape)
        start, fits = 0, True
        for name in names:
            info = self._source.info(name)
            rows = info.shape[0] if info.shape else 1
            self.copies.setdefault(name, []).append(_Copy(target, start, rows))
            start += rows
            flattened = len(info.shape) > 2 == parameter.dim()  # a convolution's weight as rows
            fits &= prod(info.shape[1:]) == prod(expected[1:]) and (flattened or len(info.shape) == len(expected))
            if info.dtype.is_floating_point != parameter.dtype.is_floating_point:
                self.problems.append(f"wrong dtype: '{name}' is {info.dtype}, the model's '{target}' {parameter.dtype}")
        if not fits or start != (expected[0] if expected else 1):
            self.problems.append(self._contradiction(target, expected, names))

    def _contradiction(self, target: str, expected: tuple[int, ...], names: list[str]) -> str:
        shapes = [self._source.info(name).shape for name in names]
        parts = ", ".join(f"'{name}' {list(shape)}" for name, shape in zip(names, shapes, strict=True))
        summed = (sum(shape[0] if shape else 1 for shape in shapes), *shapes[0][1:])
        wrong = {size for position, size in enumerate(expected) if summed[position : position + 1] != (size,)}
        fields = [f"{field} = {size}" for field, size in self._sizes.items() if size in wrong]
        because = f" because the config says {', '.join(fields)}" if fields else ""
        return f"wrong shape: the checkpoint has {parts}; the model's '{target}' is {list(expected)}{because}"

    def _leftovers(self) -> tuple[str, ...]:
        tied = set(self._table.ties.values())
        ignored = []
        for current, name in self._stored.items():
            if name in self.copies:
                continue
            if current in tied or any(fnmatchcase(current, pattern) for pattern in self._table.ignored):
                ignored.append(name)
            elif not any(current in parts for parts in self._table.targets.values()):
                self.problems.append(f"unexpected: '{name}' {list(self._source.info(name).shape)}")
        return tuple(ignored)


def _copy_rows(parameter: torch.Tensor, tensor: torch.Tensor, copy: _Copy) -> None:
    rows = parameter.reshape(1) if parameter.dim() == 0 else parameter
    target = rows.narrow(0, copy.start, copy.rows)
    source = tensor.reshape(target.shape)
    step = max(1, _PIECE // max(1, prod(target.shape[1:]) * tensor.itemsize))
    for row in range(0, copy.rows, step):
        target[row : row + step].copy_(source[row : row + step])


def _throttled(progress: Progress | None, total: int) -> Callable[[int], None]:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if progress is not None and now - last >= _QUIET:
            last = now
            progress(done, total)

    return report
