"""uint8 frames to normalised patches in one pass: an output element gathers its own four taps, or of a patch its pixel."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.image.reference import Placement
from innerloop.kernels.launch import Launch, Table

TABLE = Table(
    "image",
    default=[Launch.of(4, BLOCK=512), Launch.of(4, BLOCK=256), Launch.of(8, BLOCK=1024)],
    rows={90: [Launch.of(4, BLOCK=256)]},
)

PLANES = Table("image.planes", default=[Launch.of(4, BLOCK=1024), Launch.of(4, BLOCK=512), Launch.of(8, BLOCK=2048)])

# Twice the share of the padding that comes before the image.
_BEFORE: dict[Placement, int] = {"center": 1, "top_left": 0, "bottom_right": 2}


@triton.jit
def _taps(position, extent, longest, SIZE: tl.constexpr, BEFORE: tl.constexpr):
    """First and second tap, weight of the second, and whether a coordinate lies inside the image.

    fp64 where Python computes the resized extent, and for the source coordinate, which torch's builds round once.
    """
    resized = tl.floor(extent.to(tl.float64) / (longest.to(tl.float64) / SIZE)).to(tl.int32)
    resized = tl.minimum(tl.maximum(resized, 1), SIZE)
    position = position - (SIZE - resized) * BEFORE // 2
    inside = (position >= 0) & (position < resized)
    step = tl.div_rn(extent.to(tl.float32), resized.to(tl.float32))
    source = (step.to(tl.float64) * (position.to(tl.float64) + 0.5) - 0.5).to(tl.float32)
    source = tl.minimum(tl.maximum(source, 0.0), (extent - 1).to(tl.float32))
    first = source.to(tl.int32)
    second = tl.minimum(first + 1, extent - 1)
    return first, second, source - first.to(tl.float32), inside


@triton.jit
def _frames_to_patches(
    frames_ptr, sizes_ptr, out_ptr, capacity,
    SIZE: tl.constexpr, PATCH: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = SIZE // PATCH
    AREA: tl.constexpr = PATCH * PATCH
    camera = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = element < 3 * SIZE * SIZE
    patch, inner = element // (3 * AREA), element % (3 * AREA)
    channel, pixel = inner // AREA, inner % AREA
    release_successor(PDL)
    wait_for_producer(PDL)
    height, width = tl.load(sizes_ptr + camera * 2), tl.load(sizes_ptr + camera * 2 + 1)
    longest = tl.maximum(height, width)
    y0, y1, wy, in_y = _taps((patch // SIDE) * PATCH + pixel // PATCH, height, longest, SIZE, BEFORE)
    x0, x1, wx, in_x = _taps((patch % SIDE) * PATCH + pixel % PATCH, width, longest, SIZE, BEFORE)
    inside = held & in_y & in_x
    frame = frames_ptr + camera * capacity + channel
    left_top = tl.load(frame + (y0 * width + x0) * 3, mask=inside, other=0).to(tl.float32) / 255.0
    right_top = tl.load(frame + (y0 * width + x1) * 3, mask=inside, other=0).to(tl.float32) / 255.0
    left_bottom = tl.load(frame + (y1 * width + x0) * 3, mask=inside, other=0).to(tl.float32) / 255.0
    right_bottom = tl.load(frame + (y1 * width + x1) * 3, mask=inside, other=0).to(tl.float32) / 255.0
    top = (1.0 - wx) * left_top + wx * right_top
    bottom = (1.0 - wx) * left_bottom + wx * right_bottom
    value = tl.minimum(tl.maximum((1.0 - wy) * top + wy * bottom, 0.0), 1.0)
    value = tl.where(inside, value, 0.0) * 2.0 - 1.0
    out = out_ptr + camera * (3 * SIZE * SIZE) + element
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=held)


def frames_to_patches(
    frames: Tensor, sizes: Tensor, size: int, patch: int, dtype: torch.dtype, placement: Placement = "center"
) -> Tensor:
    """See kernels.image."""
    batch, cameras, capacity = frames.shape
    side = size // patch
    out = torch.empty((batch, cameras, side * side, 3 * patch * patch), dtype=dtype, device=frames.device)
    choice = launch.choose(TABLE, (size, patch), frames.device)
    grid = (triton.cdiv(3 * size * size, choice["BLOCK"]), batch * cameras)
    _frames_to_patches[grid](
        frames.contiguous(), sizes.contiguous(), out, capacity,
        SIZE=size, PATCH=patch, BEFORE=_BEFORE[placement], **launch.options(choice, frames.device),
    )  # fmt: skip
    return out


@triton.jit
def _planes(pixels_ptr, out_ptr, width, area, temporal, BLOCK: tl.constexpr, PDL: tl.constexpr):
    patch = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = element < width
    channel, pixel = element // (temporal * area), element % area
    release_successor(PDL)
    wait_for_producer(PDL)
    value = tl.load(pixels_ptr + patch * (3 * area) + pixel * 3 + channel, mask=held, other=0).to(tl.float32)
    value = tl.div_rn(value, 127.5) - 1.0
    tl.store(out_ptr + patch * width + element, value.to(out_ptr.dtype.element_ty), mask=held)


def planes(pixels: Tensor, temporal: int, dtype: torch.dtype) -> Tensor:
    """See kernels.image."""
    images, patches, count = pixels.shape
    width = count * temporal
    out = torch.empty((images, patches, width), dtype=dtype, device=pixels.device)
    if out.numel() == 0:
        return out
    choice = launch.choose(PLANES, (width,), pixels.device)
    _planes[(images * patches, triton.cdiv(width, choice["BLOCK"]))](
        pixels.contiguous(), out, width, count // 3, temporal, **launch.options(choice, pixels.device)
    )
    return out
