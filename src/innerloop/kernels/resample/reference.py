"""Resizes from their words, tap by tap; on the host, since it reads them."""

import torch
from torch import Tensor

from innerloop.kernels.resample.words import HEAD, Word


def resample(frames: Tensor, resizes: Tensor, steps: int, patches: int, patch: int, merge: int) -> Tensor:
    """See kernels.resample."""
    out = torch.zeros((len(frames), patches, 3 * patch * patch), dtype=torch.uint8, device=frames.device)
    for frame, words, cut in zip(frames, resizes, out, strict=True):
        picture = frame
        for step in range(steps):
            picture = _step(frame, picture, words, words[step * HEAD : (step + 1) * HEAD].tolist())
        tall, wide = words[(steps - 1) * HEAD :][[Word.OUT_HEIGHT, Word.OUT_WIDTH]].tolist()
        rows, columns = tall // patch, wide // patch
        blocks = picture.view(rows // merge, merge, patch, columns // merge, merge, 3 * patch)
        cut[: rows * columns] = blocks.permute(0, 3, 1, 4, 2, 5).reshape(rows * columns, 3 * patch * patch)
    return out


def _step(frame: Tensor, before: Tensor, words: Tensor, head: list[int]) -> Tensor:
    tall, wide, source = head[Word.HEIGHT], head[Word.WIDTH], before if head[Word.CHAINED] else frame
    image = source.reshape(-1)[: tall * wide * 3].view(tall, wide, 3)
    kind = torch.float32 if head[Word.FLOATING] else torch.int32
    start, weights = _table(words, head[Word.TABLE_X], head[Word.OUT_WIDTH], head[Word.TAPS_X], kind)
    sums = _sums(image.to(kind), 1, start, weights, 0)
    if kind is torch.int32:
        sums = ((sums + head[Word.ROUND_X]) >> head[Word.SHIFT_X]).clamp(0, head[Word.LIMIT_X])
    start, weights = _table(words, head[Word.TABLE_Y], head[Word.OUT_HEIGHT], head[Word.TAPS_Y], kind)
    sums = _sums(sums, 0, start, weights, head[Word.TERM])
    if kind is torch.int32 and not head[Word.SCALE]:
        sums = (sums + head[Word.ROUND_Y]) >> head[Word.SHIFT_Y]
    elif kind is torch.int32:
        sums = (sums.float() * torch.tensor(head[Word.SCALE], dtype=torch.int32).view(torch.float32)).round()
    else:
        sums = sums.round()
    return sums.clamp(0, 255).to(torch.uint8)


def _table(words: Tensor, at: int, count: int, taps: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where each output begins [n] and its weights [taps, n]."""
    start, weights = words[at : at + count], words[at + count : at + count * (1 + taps)]
    return start.long(), weights.view(kind).view(taps, count)


def _sums(image: Tensor, axis: int, start: Tensor, weights: Tensor, term: int) -> Tensor:
    """Weighted sums along an axis, taps in order; what lies outside the image is zero."""
    size, shape = image.shape[axis], (-1, 1, 1) if axis == 0 else (1, -1, 1)
    picture = list(image.shape)
    picture[axis] = len(start)
    total = torch.zeros(picture, dtype=image.dtype, device=image.device)
    for tap, weight in enumerate(weights):
        index = start + tap
        held = torch.where((index >= 0) & (index < size), weight, 0).to(image.dtype)
        product = image.index_select(axis, index.clamp(0, max(size - 1, 0))) * held.view(shape)
        total += product >> term if term else product
    return total
