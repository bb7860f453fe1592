"""cv2's area resize: by OpenCV, by hand, and as the taps and weights of each axis."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

_BITS = 11  # cv2 INTER_RESIZE_COEF_BITS: enlarging works with weights of so many bits


def resize_area(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3] -> [height, width, 3], cv2's INTER_AREA: means of the covered area, or bilinear where it enlarges.

    By OpenCV where it is installed, which takes a twentieth of the time.
    """
    fast = _opencv()
    return by_hand(frame, height, width) if fast is None else fast(frame, height, width)


@functools.cache
def _opencv() -> Callable[[np.ndarray, int, int], np.ndarray] | None:
    """None without OpenCV 4, whose bytes LeRobot's pictures are."""
    try:
        import cv2
    except ImportError:
        return None
    if not cv2.__version__.startswith("4."):
        return None

    def fast(frame: np.ndarray, height: int, width: int) -> np.ndarray:
        resized: np.ndarray = cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)
        return resized

    return fast


def by_hand(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """The same bytes as OpenCV 4 from numpy."""
    if height > frame.shape[0] or width > frame.shape[1]:
        return _enlarge(frame, height, width)
    if frame.shape[0] % height == 0 == frame.shape[1] % width:
        return _whole_cells(frame, height, width)
    index, share = shares(frame.shape[1], width)
    wide = np.repeat(share, frame.shape[2], axis=1)  # a weight a byte: long inner loops
    columns = _total(np.take(frame, i, 1).reshape(len(frame), -1) * w for i, w in zip(index, wide, strict=True))
    index, share = shares(frame.shape[0], height)
    mean = _total(np.take(columns, i, 0) * w[:, None] for i, w in zip(index, share, strict=True))
    rounded: np.ndarray = np.clip(np.rint(mean, out=mean), 0, 255, out=mean).astype(np.uint8)
    return rounded.reshape(height, width, -1)


def _whole_cells(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Means of whole cells; of 2 x 2 in whole numbers, where a half is rounded up and not to the even one."""
    down, across = frame.shape[0] // height, frame.shape[1] // width
    total = frame.reshape(height, down, width, across, -1).sum((1, 3), dtype=np.int32)
    if (down, across) == (2, 2):
        halved: np.ndarray = ((total + 2) >> 2).astype(np.uint8)
        return halved
    mean: np.ndarray = np.rint(total.astype(np.float32) * (np.float32(1) / np.float32(down * across))).astype(np.uint8)
    return mean


@functools.lru_cache(maxsize=32)
def shares(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source cells each of `new` covers and how much of it they are, [taps, new] (cv2 computeResizeAreaTab)."""
    scale = old / new
    start = np.arange(new) * scale
    stop = start + scale
    cell = np.minimum(scale, old - start)
    taps = int(np.ceil(scale)) + 1
    index = np.floor(start).astype(int) + np.arange(taps)[:, None]
    covered = np.minimum(index + 1, stop) - np.maximum(index, start)
    covered = np.where(covered > 1e-3, np.minimum(covered, 1.0), 0.0)
    return np.minimum(index, old - 1), (covered / cell).astype(np.float32)


def _enlarge(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear in whole numbers, with the weights that cv2's INTER_AREA has where it enlarges."""
    tall, wide, channels = frame.shape
    low, high, below, above = neighbours(wide, width)
    below, above = np.repeat(below, channels), np.repeat(above, channels)  # a weight a byte: long inner loops
    rows = np.take(frame, low, 1).reshape(tall, -1) * below
    rows += np.take(frame, high, 1).reshape(tall, -1) * above
    rows >>= 4
    low, high, below, above = neighbours(tall, height)
    blended = np.take(rows, low, 0)
    blended *= below[:, None]
    blended >>= 16
    more = np.take(rows, high, 0)
    more *= above[:, None]
    more >>= 16
    blended += more
    blended += 2
    blended >>= 2
    enlarged: np.ndarray = np.clip(blended, 0, 255, out=blended).astype(np.uint8)
    return enlarged.reshape(height, width, channels)


@functools.lru_cache(maxsize=32)
def neighbours(old: int, new: int) -> tuple[np.ndarray, ...]:
    """Lower and upper source cell of each new one, and the share of each in 2^11ths."""
    at = np.arange(new)
    inverse = new / old
    low = np.floor(at * (1.0 / inverse)).astype(int)
    share = ((at + 1) - (low + 1) * inverse).astype(np.float32)
    share = np.where(share <= 0, np.float32(0), share - np.floor(share))
    share = np.where(low >= old - 1, np.float32(0), share)
    low = np.minimum(low, old - 1)
    above = np.rint(share * (1 << _BITS)).astype(np.int32)
    return low, np.minimum(low + 1, old - 1), (1 << _BITS) - above, above


def _total(parts: Iterator[np.ndarray]) -> np.ndarray:
    """Their sum, in order: the order is that of cv2's rounding."""
    total = next(parts)
    for part in parts:
        total += part
    return total
