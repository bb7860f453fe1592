"""A resize in one launch: a program makes some rows of a patch from the source rows that they cover, one after another."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Table
from innerloop.kernels.resample.words import HEAD as _HEAD
from innerloop.kernels.resample.words import Word, room

TABLE = Table(
    "resample",
    default=[Launch.of(w, ROWS=r) for w, r in ((1, 4), (2, 4), (1, 2), (1, 8), (2, 8), (4, 8))],
    suits=lambda launch, shape, limits: shape[1] % launch["ROWS"] == 0,
)

HEAD = tl.constexpr(_HEAD)
HEIGHT, WIDTH, CHAINED, FLOATING = (
    tl.constexpr(int(w)) for w in (Word.HEIGHT, Word.WIDTH, Word.CHAINED, Word.FLOATING)
)
OUT_HEIGHT, OUT_WIDTH = tl.constexpr(int(Word.OUT_HEIGHT)), tl.constexpr(int(Word.OUT_WIDTH))
TAPS_X, TAPS_Y = tl.constexpr(int(Word.TAPS_X)), tl.constexpr(int(Word.TAPS_Y))
TABLE_X, TABLE_Y = tl.constexpr(int(Word.TABLE_X)), tl.constexpr(int(Word.TABLE_Y))
ROUND_X, SHIFT_X, LIMIT_X = (tl.constexpr(int(w)) for w in (Word.ROUND_X, Word.SHIFT_X, Word.LIMIT_X))
TERM, ROUND_Y, SHIFT_Y = (tl.constexpr(int(w)) for w in (Word.TERM, Word.ROUND_Y, Word.SHIFT_Y))
SCALE = tl.constexpr(int(Word.SCALE))
FAR = tl.constexpr(1 << 30)


@triton.jit
def _nearest(x):
    """Of x in 0 to 2^22, the nearest whole number, halves to the even one."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _whole(source, words, head, x, y, in_x, in_y, channel, first_x, first_y, low, high, out_height, out_width,
           ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Rounded sums in whole numbers, float32 [ROWS, SPAN], before they are cut to 0..255."""
    width, taps_x, taps_y = tl.load(head + WIDTH), tl.load(head + TAPS_X), tl.load(head + TAPS_Y)
    half, shift, limit = tl.load(head + ROUND_X), tl.load(head + SHIFT_X), tl.load(head + LIMIT_X)
    term, scale = tl.load(head + TERM), tl.load(head + SCALE)
    weights_x, weights_y = words + tl.load(head + TABLE_X) + out_width, words + tl.load(head + TABLE_Y) + out_height
    total = tl.zeros((ROWS, SPAN), tl.int32)
    for line in range(low, high):
        row = tl.zeros((SPAN,), tl.int32)
        for tap in range(taps_x):
            column = first_x + tap
            held = in_x & (column >= 0) & (column < width)
            pixel = tl.load(source + (line * width + column) * 3 + channel, mask=held, other=0).to(tl.int32)
            row += pixel * tl.load(weights_x + tap * out_width + x, mask=held, other=0)
        row = tl.minimum(tl.maximum((row + half) >> shift, 0), limit)
        tap_y = line - first_y
        weight = tl.load(weights_y + tap_y * out_height + y, mask=in_y & (tap_y >= 0) & (tap_y < taps_y), other=0)
        total += (weight[:, None] * row[None, :]) >> term
    mean = _nearest(total.to(tl.float32) * scale.to(tl.float32, bitcast=True))
    shifted = (total + tl.load(head + ROUND_Y)) >> tl.load(head + SHIFT_Y)
    return tl.where(scale == 0, tl.minimum(tl.maximum(shifted, 0), 255).to(tl.float32), mean)


@triton.jit
def _float(source, words, head, x, y, in_x, in_y, channel, first_x, first_y, low, high, out_height, out_width,
           ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """The same with weights and sums in float32, taps in order; products and sums are rounded each (no fused ones)."""
    width, taps_x, taps_y = tl.load(head + WIDTH), tl.load(head + TAPS_X), tl.load(head + TAPS_Y)
    weights_x, weights_y = words + tl.load(head + TABLE_X) + out_width, words + tl.load(head + TABLE_Y) + out_height
    total = tl.zeros((ROWS, SPAN), tl.float32)
    for line in range(low, high):
        row = tl.zeros((SPAN,), tl.float32)
        for tap in range(taps_x):
            column = first_x + tap
            held = in_x & (column >= 0) & (column < width)
            pixel = tl.load(source + (line * width + column) * 3 + channel, mask=held, other=0).to(tl.float32)
            weight = tl.load(weights_x + tap * out_width + x, mask=held, other=0)
            row += pixel * weight.to(tl.float32, bitcast=True)
        tap_y = line - first_y
        weight = tl.load(weights_y + tap_y * out_height + y, mask=in_y & (tap_y >= 0) & (tap_y < taps_y), other=0)
        total += weight.to(tl.float32, bitcast=True)[:, None] * row[None, :]
    return _nearest(total)


@triton.jit
def _resample(
    frames_ptr, before_ptr, words_ptr, out_ptr, capacity, space, words_row, out_row, step, patches, tiles_room,
    LAST: tl.constexpr, PATCH: tl.constexpr, MERGE: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    image, parts = tl.program_id(1).to(tl.int64), PATCH // ROWS
    inner = tl.arange(0, SPAN)
    channel, line = inner % 3, tl.arange(0, ROWS)
    words, out = words_ptr + image * words_row, out_ptr + image * out_row
    head = words + step * HEAD
    release_successor(PDL)
    wait_for_producer(PDL)
    height, out_height, out_width = tl.load(head + HEIGHT), tl.load(head + OUT_HEIGHT), tl.load(head + OUT_WIDTH)
    source = frames_ptr + image * capacity
    if tl.load(head + CHAINED) != 0:
        source = before_ptr + image * space
    across = tl.maximum(out_width // PATCH, 1)
    if LAST:
        tiles = patches * parts
    else:
        across = tl.maximum((out_width + PATCH - 1) // PATCH, 1)
        tiles = (out_height + ROWS - 1) // ROWS * across
    for tile in range(tl.program_id(0), tiles, tiles_room):
        if LAST:
            patch = tile // parts
            block, place = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
            blocks = tl.maximum(across // MERGE, 1)
            top = ((block // blocks) * MERGE + place // MERGE) * PATCH + (tile % parts) * ROWS
            left = ((block % blocks) * MERGE + place % MERGE) * PATCH
        else:
            top, left = (tile // across) * ROWS, (tile % across) * PATCH
        y, x = top + line, left + inner // 3
        in_y, in_x = y < out_height, (x < out_width) & (inner < 3 * PATCH)
        first_y = tl.load(words + tl.load(head + TABLE_Y) + y, mask=in_y, other=FAR)
        first_x = tl.load(words + tl.load(head + TABLE_X) + x, mask=in_x, other=0)
        low = tl.maximum(tl.min(first_y, 0), 0)
        high = tl.minimum(tl.max(tl.where(in_y, first_y, -FAR), 0) + tl.load(head + TAPS_Y), height)
        if tl.load(head + FLOATING) != 0:
            value = _float(source, words, head, x, y, in_x, in_y, channel, first_x, first_y, low, high,
                           out_height, out_width, ROWS, SPAN)  # fmt: skip
        else:
            value = _whole(source, words, head, x, y, in_x, in_y, channel, first_x, first_y, low, high,
                           out_height, out_width, ROWS, SPAN)  # fmt: skip
        value = tl.minimum(tl.maximum(value, 0.0), 255.0)
        shown = in_y[:, None] & in_x[None, :]
        value = tl.where(shown, value, 0.0).to(tl.int32).to(tl.uint8)
        if LAST:
            at = (tile * ROWS + line)[:, None] * (3 * PATCH) + inner[None, :]
            tl.store(out + at, value, mask=((line >= 0)[:, None]) & (inner < 3 * PATCH)[None, :])
        else:
            at = (y * out_width)[:, None] * 3 + (left * 3 + inner)[None, :]
            tl.store(out + at, value, mask=shown)


def resample(frames: Tensor, resizes: Tensor, steps: int, patches: int, patch: int, merge: int) -> Tensor:
    """See kernels.resample."""
    images, device = len(frames), frames.device
    out = torch.empty((images, patches, 3 * patch * patch), dtype=torch.uint8, device=device)
    if out.numel() == 0:
        return out
    frames, resizes, (_, space) = frames.contiguous(), resizes.contiguous(), room(patches, patch)
    choice = launch.choose(TABLE, (patches, patch), device)
    tiles = patches * (patch // choice["ROWS"])
    before = frames
    for step in range(steps):
        last = step == steps - 1
        made = out if last else torch.empty((images, space), dtype=torch.uint8, device=device)
        _resample[(tiles, images)](
            frames, before, resizes, made, frames.shape[1], before.shape[1], resizes.shape[1], made[0].numel(),
            step, patches, tiles, LAST=last, PATCH=patch, MERGE=merge, SPAN=triton.next_power_of_2(3 * patch),
            enable_fp_fusion=False, **launch.options(choice, device),
        )  # fmt: skip
        before = made
    return out
