"""Resizes and windows of a frame: done on the host, or written down as the words of kernels.resample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from innerloop.kernels.resample import HEAD, Word
from innerloop.process import area, bicubic


@dataclass(frozen=True)
class Resize:
    """To height and width: torch's antialiased bicubic, or cv2's area resize."""

    kind: Literal["bicubic", "area"]
    height: int
    width: int

    def apply(self, frame: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> [height, width, 3]."""
        way = area.resize_area if self.kind == "area" else bicubic.resize
        return way(frame, self.height, self.width)


@dataclass(frozen=True)
class Window:
    """height x width pixels from (top, left) on; black where the frame ends."""

    top: int
    left: int
    height: int
    width: int

    def apply(self, frame: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> [height, width, 3]."""
        tall, wide = frame.shape[:2]
        out = np.zeros((self.height, self.width, 3), np.uint8)
        top, left = max(self.top, 0), max(self.left, 0)
        part = frame[top : min(self.top + self.height, tall), left : min(self.left + self.width, wide)]
        out[top - self.top :, left - self.left :][: part.shape[0], : part.shape[1]] = part
        return out


Operation = Resize | Window


def applied(operations: Sequence[Operation], frame: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] after all of them; the frame itself without any."""
    for operation in operations:
        frame = operation.apply(frame)
    return frame


@dataclass(frozen=True)
class _Axis:
    """start [n]; weights [taps, n], int32 or float32."""

    start: np.ndarray
    weights: np.ndarray

    def moved(self, offset: int) -> "_Axis":
        return replace(self, start=self.start + offset)

    def cut(self, first: int, count: int) -> "_Axis":
        return _Axis(self.start[first : first + count], self.weights[:, first : first + count])

    def words(self) -> list[np.ndarray]:
        return [self.start.astype(np.int32), np.ascontiguousarray(self.weights).view(np.int32).reshape(-1)]


@dataclass(frozen=True)
class _Step:
    """A resize whose source is `stored` high and wide; `head`: the words that its arithmetic takes."""

    stored: tuple[int, int]
    y: _Axis
    x: _Axis
    head: dict[Word, int]

    @property
    def size(self) -> tuple[int, int]:
        return len(self.y.start), len(self.x.start)


def program(
    size: tuple[int, int], operations: Sequence[Operation], steps: int, room: tuple[int, int]
) -> np.ndarray | None:
    """int32 words for frames of `size`, read-only; None where they need more steps, words or bytes between steps.

    room: words, and bytes of a picture between two steps.
    """
    chain = _chain(size, operations)
    if len(chain) > steps or any(3 * tall * wide > room[1] for tall, wide in (step.size for step in chain[:-1])):
        return None
    heads, tables, at = np.zeros((steps, HEAD), np.int32), [np.zeros(0, np.int32)], steps * HEAD
    for i, step in enumerate(chain, steps - len(chain)):
        head = heads[i]
        for word, value in step.head.items():
            head[word] = value
        head[[Word.HEIGHT, Word.WIDTH, Word.OUT_HEIGHT, Word.OUT_WIDTH]] = (*step.stored, *step.size)
        head[Word.CHAINED] = i > steps - len(chain)
        head[[Word.TAPS_Y, Word.TAPS_X]] = len(step.y.weights), len(step.x.weights)
        for word, axis in ((Word.TABLE_X, step.x), (Word.TABLE_Y, step.y)):
            head[word] = at
            tables += axis.words()
            at += axis.start.size + axis.weights.size
    if at > room[0]:
        return None
    words = np.concatenate([heads.reshape(-1), *tables])
    words.setflags(write=False)
    return words


def nothing(steps: int) -> np.ndarray:
    """The words of a slot without a frame."""
    words = np.zeros(steps * HEAD, np.int32)
    words.setflags(write=False)
    return words


def _chain(size: tuple[int, int], operations: Sequence[Operation]) -> list[_Step]:
    """One step a resize; a window is where the next one reads, or which part of the last one is made at all."""
    chain: list[_Step] = []
    stored, top, left = size, 0, 0
    tall, wide = size
    for operation in operations:
        unread = chain and not top and not left and stored == (tall, wide)
        if isinstance(operation, Window) and unread and _within(operation, tall, wide):
            last = chain[-1]
            y, x = last.y.cut(operation.top, operation.height), last.x.cut(operation.left, operation.width)
            chain[-1] = replace(last, y=y, x=x)
            stored = chain[-1].size
        elif isinstance(operation, Window):
            top, left = top + operation.top, left + operation.left
        else:
            step = _resize(operation, tall, wide)
            chain.append(replace(step, stored=stored, y=step.y.moved(top), x=step.x.moved(left)))
            stored, top, left = chain[-1].size, 0, 0
        tall, wide = operation.height, operation.width
    if not chain or top or left or stored != (tall, wide):
        chain.append(_Step(stored, _same(tall).moved(top), _same(wide).moved(left), {Word.LIMIT_X: 255}))
    return chain


def _within(window: Window, tall: int, wide: int) -> bool:
    fits = window.top + window.height <= tall and window.left + window.width <= wide
    return fits and min(window.top, window.left) >= 0


def _same(count: int) -> _Axis:
    return _Axis(np.arange(count, dtype=np.int32), np.ones((1, count), np.int32))


def _resize(to: Resize, tall: int, wide: int) -> _Step:
    old = (tall, wide)
    if to.kind == "bicubic":
        return _bicubic(old, to)
    if to.height > tall or to.width > wide:
        return _enlarging(old, to)
    if tall % to.height == 0 == wide % to.width:
        return _cells(old, to)
    (rows, down), (columns, across) = area.shares(tall, to.height), area.shares(wide, to.width)
    y, x = _Axis(rows[0].astype(np.int32), down), _Axis(columns[0].astype(np.int32), across)
    return _Step(old, y, x, {Word.FLOATING: 1})


def _bicubic(old: tuple[int, int], to: Resize) -> _Step:
    """An axis that keeps its length has no pass of its own in torch."""
    head, axes = {Word.LIMIT_X: 255}, []
    ways = ((old[0], to.height, Word.ROUND_Y, Word.SHIFT_Y), (old[1], to.width, Word.ROUND_X, Word.SHIFT_X))
    for before, after, half, shift in ways:
        if before == after:
            axes.append(_same(after))
            continue
        start, weights, bits = bicubic.weights(before, after)
        axes.append(_Axis(start, weights))
        head |= {half: 1 << (bits - 1), shift: bits}
    return _Step(old, axes[0], axes[1], head)


def _enlarging(old: tuple[int, int], to: Resize) -> _Step:
    """Shifts of cv2's bilinear in whole numbers: 4 after the rows, 16 a product, 2 with rounding at the end."""
    axes = []
    for a, b in ((old[0], to.height), (old[1], to.width)):
        low, _, below, above = area.neighbours(a, b)
        axes.append(_Axis(low.astype(np.int32), np.stack([below, above]).astype(np.int32)))
    head = {Word.SHIFT_X: 4, Word.LIMIT_X: 1 << 15, Word.TERM: 16, Word.ROUND_Y: 2, Word.SHIFT_Y: 2}
    return _Step(old, axes[0], axes[1], head)


def _cells(old: tuple[int, int], to: Resize) -> _Step:
    """Sums of whole cells; the mean by float32, but of 2 x 2 in whole numbers."""
    down, across = old[0] // to.height, old[1] // to.width
    axes = [
        _Axis(np.arange(n, dtype=np.int32) * taps, np.ones((taps, n), np.int32))
        for n, taps in ((to.height, down), (to.width, across))
    ]
    head = {Word.LIMIT_X: 255 * across}
    if (down, across) == (2, 2):
        return _Step(old, axes[0], axes[1], head | {Word.ROUND_Y: 2, Word.SHIFT_Y: 2})
    scale = np.float32(1) / np.float32(down * across)
    return _Step(old, axes[0], axes[1], head | {Word.SCALE: int(scale.view(np.int32))})
