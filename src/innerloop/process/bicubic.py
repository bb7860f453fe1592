"""torch's antialiased bicubic resize of bytes, and its weights as the whole numbers that they are."""

import functools

import numpy as np
import torch
import torch.nn.functional as F

MOST_BITS = 22  # of a weight, where they are so many and so even that 16 bits would hold more


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3] -> [height, width, 3], bicubic and antialiased: the bytes of transformers' fast image processor.

    Pillow's differ by one in some pixels, for its coefficients are finer. The batch axis is made before the others move:
    only so does torch see channels last, and neither split them nor join them again.
    """
    planes = torch.from_numpy(np.array(image, order="C"))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    out: np.ndarray = resized.permute(0, 2, 3, 1)[0].numpy()
    return np.ascontiguousarray(out)


@functools.lru_cache(maxsize=64)
def weights(old: int, new: int) -> tuple[np.ndarray, np.ndarray, int]:
    """First source pixel of each output [new], weights int32 [taps, new], and their precision in bits.

    A cubic of a = -0.5 in float64 over 4 * max(scale, 1) pixels, normalised, rounded away from zero, with as many bits
    as the largest weight leaves of 16 (torch, ATen UpSampleKernel).
    """
    scale = old / new
    stretch = max(scale, 1.0)
    center = (np.arange(new) + 0.5) * scale
    start = np.maximum((center - 2 * stretch + 0.5).astype(int), 0)
    stop = np.minimum((center + 2 * stretch + 0.5).astype(int), old)
    taps = np.arange(int((stop - start).max()))[:, None]
    cubic = _cubic(((taps + start) - center + 0.5) * (1.0 / stretch))
    cubic = np.where(taps < stop - start, cubic, 0.0)
    total = np.zeros(new)
    for row in cubic:  # in order, as the compiled loops add
        total += row
    shares = cubic / total
    largest = float(shares.max())
    bits = next((p for p in range(MOST_BITS) if int(0.5 + largest * (1 << (p + 1))) >= 1 << 15), MOST_BITS)
    whole = np.trunc(shares * (1 << bits) + np.where(shares < 0, -0.5, 0.5))
    return start.astype(np.int32), whole.astype(np.int32), bits


def _cubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
