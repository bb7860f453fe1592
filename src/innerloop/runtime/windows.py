"""The host's side of input and output buffers: pinned staging, rows partly in use, and what has changed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from innerloop.contract.buffer import Buffer, Role
from innerloop.contract.errors import ObservationError, PlanError
from innerloop.runtime.arena import Arena
from innerloop.runtime.queue import Queue
from innerloop.runtime.refresh import NOTHING, SMALL, Ledger, Refresh, Step

Value = np.ndarray | Sequence[np.ndarray]  # an array, or one flat array a row where rows differ in length
Pieces = tuple[np.ndarray, ...]  # uint8: the whole window, or the used bytes of every row
Kept = list[Pieces | None]  # a session's last values; None where they lie in the staging memory or were never given

GLANCE = 1024  # bytes; a new frame shows in the ones in its middle, which spares reading all of it
BLOCK = 65536  # bytes compared at once, so that what is compared stays in the nearest caches

NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
}


def host_dtype(buffer: Buffer) -> np.dtype[Any]:
    """The numpy dtype of a window. Raises PlanError for one that numpy has not (bfloat16)."""
    if buffer.dtype not in NUMPY:
        raise PlanError(f"window '{buffer.name}' is {buffer.dtype}, which the host cannot read: declare it float32")
    return NUMPY[buffer.dtype]


def pieces(buffer: Buffer, value: Value) -> Pieces:
    """The bytes of a value as the window takes them; not a copy where the value is contiguous.

    The batch axis may be left out when it is 1; rows may be shorter. Raises ObservationError for another dtype or shape.
    """
    if isinstance(value, np.ndarray):
        array = _fit(buffer, value)
        if array.shape == buffer.shape:
            return (_bytes(array),)
        return tuple(_bytes(row) for row in array.reshape(-1, array.shape[-1]))
    rows = math.prod(buffer.shape[:-1])
    if len(value) != rows:
        raise ObservationError(f"input '{buffer.name}' was given {len(value)} rows; it has {rows}")
    for row in value:
        _check_dtype(buffer, row)
        if row.ndim != 1 or not 0 < row.size <= buffer.shape[-1]:
            raise ObservationError(
                f"a row of input '{buffer.name}' has shape {list(row.shape)}; it must be flat, 1 to {buffer.shape[-1]} long"
            )
    return tuple(_bytes(row) for row in value)


def write_window(arena: Arena, name: str, value: Value) -> None:
    """Copies a value straight into an input window, waiting for it. Raises PlanError for what is not an input."""
    buffer = arena.layout.buffers.get(name)
    if buffer is None or buffer.role is not Role.INPUT:
        known = [b.name for b in arena.layout.buffers.values() if b.role is Role.INPUT]
        raise PlanError(f"'{name}' is not an input of plan {arena.plans[0].name}; its inputs are {known}")
    given = pieces(buffer, value)
    rows = arena.bytes_of(name)[: buffer.bytes].view(len(given), -1)
    for row, piece in zip(rows, given, strict=True):
        row[: piece.size].copy_(torch.from_numpy(piece.copy()))


class Slot:
    """One input: its place in the input region, and what its staging memory holds."""

    __slots__ = ("_dtype", "_shapes", "at", "buffer", "content", "end", "index", "raw", "small", "start", "views")

    def __init__(self, buffer: Buffer, at: int, index: int, start: int) -> None:
        self.buffer = buffer
        self.at = at  # among the inputs
        self.index = index  # of the buffer in the refresh table
        self.start = start
        self.end = start + buffer.bytes
        self.small = buffer.bytes <= SMALL
        self.content = NOTHING
        self.views: Pieces = ()  # the staged pieces, as views of the staging memory
        self.raw: bytes | None = None  # what is staged, where it is one small piece
        self._dtype = host_dtype(buffer)
        self._shapes = {buffer.shape, buffer.shape[1:]} if buffer.shape[:1] == (1,) else {buffer.shape}

    def starts(self, rows: int) -> range:
        """Where each of so many rows begins."""
        return range(self.start, self.end, self.buffer.bytes // rows)

    def bytes_of(self, value: Value) -> bytes | None:
        """A whole small value; None for what is large, shorter, in rows or wrong."""
        if self.small and isinstance(value, np.ndarray) and value.shape in self._shapes and value.dtype == self._dtype:
            return value.tobytes()
        return None


class Given(NamedTuple):
    """Values of a decision as bytes: whole small ones, and others."""

    small: list[tuple[Slot, bytes]]
    others: list[tuple[Slot, Pieces]]


class Windows:
    """Staging for the inputs and outputs of an arena; pinned on CUDA. Only who has the device's turn may call, unless a
    method says otherwise. queue: of the stream that copies go to, by default the current one."""

    def __init__(self, arena: Arena, refresh: Refresh, queue: Queue | None = None) -> None:
        self._refresh = refresh
        self.pinned = arena.device.type == "cuda"
        self.queue = Queue(torch.cuda.current_stream(arena.device)) if self.pinned and queue is None else queue
        self._slots = [_slot(arena, refresh, at, index) for at, index in enumerate(refresh.inputs)]
        self._by_name = {slot.buffer.name: slot for slot in self._slots}
        self._in_order = sorted(self._slots, key=lambda slot: slot.start)
        self._read = {step.key: frozenset(step.reads) for steps in refresh.steps for step in steps}
        self._device = arena.regions[Role.INPUT.value]
        self._staging = torch.zeros(self._device.shape, dtype=torch.uint8, pin_memory=self.pinned)
        self._host = self._staging.numpy()
        self._memory = self._host.data
        self._differs = np.empty(BLOCK // 8, np.bool_)
        self._out_device = arena.regions[Role.OUTPUT.value]
        self._out_staging = torch.zeros(self._out_device.shape, dtype=torch.uint8, pin_memory=self.pinned)
        self._outputs = {name: self._output_view(arena, name) for name in (refresh.names[i] for i in refresh.outputs)}
        self._beside = False  # whether copies go aside of what the device is at
        self._done = torch.cuda.Event() if self.pinned else None  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where copies go; None without a GPU."""
        return None if self.queue is None else self.queue.stream

    def look(self, inputs: Mapping[str, Value], first: frozenset[int]) -> tuple[Given, Given]:
        """The values as bytes, those of the buffers `first` apart. Raises ObservationError before anything changes."""
        early, late = Given([], []), Given([], [])
        for name, value in inputs.items():
            slot = self._by_name.get(name)
            if slot is None:
                raise ObservationError(f"'{name}' is no input of this policy; its inputs are {sorted(self._by_name)}")
            given = early if slot.index in first else late
            raw = slot.bytes_of(value)
            if raw is None:
                given.others.append((slot, pieces(slot.buffer, value)))
            else:
                given.small.append((slot, raw))
        return early, late

    def stage(self, given: Given, ledger: Ledger, kept: Kept) -> None:
        """Copies what differs from the session's last values into staging, under fresh content numbers.

        Large ones start on their way to the device at once, and travel while the rest is looked at.
        """
        for slot, new in given.others:
            if self._changes(slot, new, ledger.versions[slot.index], kept[slot.at]):
                self._fill(slot, new, self._renewed(slot, ledger, kept))
        for slot, raw in given.small:
            saved = kept[slot.at]
            if saved is None:
                same = slot.raw == raw and slot.content == ledger.versions[slot.index]
            else:
                same = len(saved) == 1 and saved[0].tobytes() == raw
            if not same:
                self._put(slot, raw, self._renewed(slot, ledger, kept))

    @contextmanager
    def beside(self, when: bool) -> Iterator[None]:
        """If `when`: inputs staged and uploaded inside reach the device beside the steps that it is at, which read none of
        them; what it is asked afterwards waits for them.
        """
        if not when or self.queue is None:
            yield
            return
        self._beside = True
        try:
            yield
        finally:
            self._beside = False
            self.queue.join()

    def upload(self, due: Sequence[tuple[Step, int]], ledger: Ledger, kept: Kept) -> None:
        """Starts the copies of the inputs that due steps read and the arena does not hold."""
        versions, present, first = ledger.versions, self._refresh.present, self._refresh.first_inputs
        needed = [self._read[step.key] for step, _ in due]
        missing = [
            slot
            for slot in self._in_order
            if present[slot.index] != versions[slot.index] and any(slot.index in reads for reads in needed)
        ]
        for slot in missing:
            self._restage(slot, versions[slot.index], kept[slot.at])
        run: list[Slot] = []
        for slot in self._in_order if missing else ():
            if slot not in missing:
                # Copied along, it would bring in another session's value, or be written while a step reads it.
                if present[slot.index] != slot.content or (self._beside and slot.index in first):
                    self._copy_run(run)
                    run = []
            elif slot.small:
                run.append(slot)
            elif present[slot.index] != slot.content:  # otherwise it left when it was staged
                self._copy_rows(slot)
        self._copy_run(run)

    def fetch(self) -> None:
        """Starts the copy of all outputs to the host, and marks its end."""
        if self.queue is None:
            self._out_staging.numpy()[:] = self._out_device.numpy()
        else:
            self.queue.copy_out(self._out_staging.data_ptr(), self._out_device.data_ptr(), self._out_device.numel())
        self.mark()

    def mark(self) -> None:
        """Everything started so far is what `wait` waits for."""
        if self._done is not None:
            self._done.record(self.stream)

    def wait(self) -> None:
        """Waits for the mark: the one synchronisation of a decision. Any thread may call."""
        if self._done is not None:
            self._done.synchronize()

    def outputs(self) -> dict[str, np.ndarray]:
        """Copies of the outputs by name, in the plan's shapes, once they have been waited for. Any thread may call."""
        return {name: view.copy() for name, view in self._outputs.items()}

    def save(self, ledger: Ledger, kept: Kept) -> None:
        """Copies a session's staged values out, before another session's take their place."""
        for slot in self._slots:
            if kept[slot.at] is None and slot.content == ledger.versions[slot.index]:
                kept[slot.at] = tuple(view.copy() for view in slot.views)

    def nothing(self) -> Kept:
        """Of a session that has given nothing."""
        return [None] * len(self._slots)

    def _changes(self, slot: Slot, new: Pieces, version: int, saved: Pieces | None) -> bool:
        if saved is None:
            if slot.content != version:
                return True
            saved = slot.views
        if len(saved) != len(new):
            return True
        return any(a.size != b.size or self._any_differs(a, b) for a, b in zip(saved, new, strict=True))

    def _any_differs(self, a: np.ndarray, b: np.ndarray) -> bool:
        if a.size <= SMALL:
            return a.tobytes() != b.tobytes()
        middle, whole = a.size // 2, a.size // BLOCK * BLOCK
        if a[middle : middle + GLANCE].tobytes() != b[middle : middle + GLANCE].tobytes():
            return True
        for at in range(0, whole, BLOCK):
            words = a[at : at + BLOCK].view(np.uint64), b[at : at + BLOCK].view(np.uint64)
            if np.not_equal(*words, out=self._differs).any():
                return True
        return a[whole:].tobytes() != b[whole:].tobytes()

    def _renewed(self, slot: Slot, ledger: Ledger, kept: Kept) -> int:
        content = self._refresh.fresh()
        ledger.versions[slot.index] = content
        kept[slot.at] = None
        return content

    def _put(self, slot: Slot, raw: bytes, content: int) -> None:
        slot.content = NOTHING  # an interrupt may come anywhere: what is half written has no number
        self._memory[slot.start : slot.start + len(raw)] = raw
        if slot.raw is None:  # not yet staged whole
            slot.views = (self._host[slot.start : slot.start + len(raw)],)
        slot.raw, slot.content = raw, content

    def _fill(self, slot: Slot, new: Pieces, content: int) -> None:
        slot.content, slot.raw = NOTHING, None
        if not slot.small:
            self._refresh.present[slot.index] = NOTHING
        starts = slot.starts(len(new))
        if [piece.size for piece in new] != [view.size for view in slot.views]:
            slot.views = tuple(self._host[at : at + piece.size] for at, piece in zip(starts, new, strict=True))
        for start, view, piece in zip(starts, slot.views, new, strict=True):
            view[:] = piece
            if not slot.small:
                self._copy(start, start + view.size)
        slot.content = content
        if not slot.small:
            self._refresh.present[slot.index] = content

    def _restage(self, slot: Slot, content: int, saved: Pieces | None) -> None:
        if not content:
            raise ObservationError(
                f"input '{slot.buffer.name}' was never given: a session's first decision needs every input"
            )
        if slot.content != content:
            if saved is None:  # an inactive session's inputs are saved when another takes the arena
                raise ObservationError(f"input '{slot.buffer.name}' was lost in an interrupted decision: give it again")
            self._fill(slot, saved, content)

    def _copy_run(self, run: Sequence[Slot]) -> None:
        """One copy for small inputs and what lies between them."""
        if not run:
            return
        for slot in run:
            self._refresh.present[slot.index] = NOTHING
        self._copy(run[0].start, run[-1].end)
        for slot in run:
            self._refresh.present[slot.index] = slot.content

    def _copy_rows(self, slot: Slot) -> None:
        self._refresh.present[slot.index] = NOTHING
        for start, view in zip(slot.starts(len(slot.views)), slot.views, strict=True):
            self._copy(start, start + view.size)
        self._refresh.present[slot.index] = slot.content

    def _copy(self, start: int, end: int) -> None:
        """Starts one copy from staging into the same place on the device."""
        if self.queue is None:
            self._device.numpy()[start:end] = self._host[start:end]
        else:
            copy = self.queue.copy_aside if self._beside else self.queue.copy_in
            copy(self._device.data_ptr() + start, self._staging.data_ptr() + start, end - start)

    def _output_view(self, arena: Arena, name: str) -> np.ndarray:
        buffer = arena.layout.buffers[name]
        start = arena.layout.places[name][1]
        return self._out_staging[start : start + buffer.bytes].numpy().view(host_dtype(buffer)).reshape(buffer.shape)


def _slot(arena: Arena, refresh: Refresh, at: int, index: int) -> Slot:
    buffer = arena.layout.buffers[refresh.names[index]]
    return Slot(buffer, at, index, arena.layout.places[buffer.name][1])


def _check_dtype(buffer: Buffer, array: np.ndarray) -> None:
    wanted = host_dtype(buffer)
    if array.dtype != wanted:
        raise ObservationError(f"input '{buffer.name}' is {array.dtype}, not {wanted}: convert it with astype")


def _fit(buffer: Buffer, value: np.ndarray) -> np.ndarray:
    _check_dtype(buffer, value)
    array = value[None] if value.ndim == len(buffer.shape) - 1 and buffer.shape[0] == 1 else value
    same = array.ndim == len(buffer.shape) and array.shape[:-1] == buffer.shape[:-1]
    if not same or (array.ndim and not 0 < array.shape[-1] <= buffer.shape[-1]):
        raise ObservationError(
            f"input '{buffer.name}' has shape {list(value.shape)}, not {list(buffer.shape)} (the last axis may be shorter)"
        )
    return array


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
