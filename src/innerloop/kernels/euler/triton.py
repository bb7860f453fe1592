"""The first projection; the last one and the solver's update in one kernel; what a previous chunk does to it in others."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.activation import triton as activation_triton
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Shape, Table

TABLE = Table("euler", default=[Launch.of(4, BLOCK_A=4), Launch.of(4, BLOCK_A=2), Launch.of(8, BLOCK_A=8)])


def _entry_bytes(choice: Launch, shape: Shape) -> int:
    """Both operands of a product of fp32 parts."""
    return (choice["BLOCK_M"] + choice["BLOCK_N"]) * launch.two_tiles(shape[1])[0] * 4


ENTRY = Table(
    "euler.entry",
    default=[Launch.of(warps, BLOCK_M=16, BLOCK_N=columns) for warps, columns in ((4, 64), (2, 32), (4, 32), (4, 16))],
    shared_bytes=_entry_bytes,
)

GUIDE = Table("guide", default=[Launch.of(4, BLOCK=512), Launch.of(1, BLOCK=128)])


@triton.jit
def _columns(ptr, row, real, column, width):
    """A tile of a matrix in fp32, zeros outside it."""
    at = ptr + row[:, None] * width + column[None, :]
    return tl.load(at, mask=real[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _project_in(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, actions, width,
    KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Three products of TF32 parts, whose error a result of 16 bits does not show: multiply-adds took five times as long.
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32x3"
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, there = row < rows, column < width
    action = tl.arange(0, FIRST)
    weight = _columns(weight_ptr, column, there, action, actions)
    if SECOND > 0:
        rest = FIRST + tl.arange(0, SECOND)
        weight_rest = _columns(weight_ptr, column, there, rest, actions)
    bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    release_successor(PDL)
    wait_for_producer(PDL)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    y = tl.dot(_columns(x_ptr, row, real, action, actions), tl.trans(weight), y, input_precision=PRECISION)
    if SECOND > 0:
        y = tl.dot(_columns(x_ptr, row, real, rest, actions), tl.trans(weight_rest), y, input_precision=PRECISION)
    y += bias[None, :]
    if KIND != "":
        y = activation_triton.activated(y, KIND)
    out_at = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=real[:, None] & there[None, :])


def project_in(
    x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, activation: Activation | None = None
) -> Tensor:
    """See kernels.euler."""
    width, actions = weight.shape
    out = torch.empty((*x.shape[:-1], width), dtype=dtype, device=x.device)
    rows = x.numel() // actions
    if rows == 0:
        return out
    choice, (first, second) = launch.choose(ENTRY, (rows, actions, width), x.device), launch.two_tiles(actions)
    grid = (triton.cdiv(rows, choice["BLOCK_M"]), triton.cdiv(width, choice["BLOCK_N"]))
    _project_in[grid](
        x.contiguous(), weight.contiguous(), bias, out, rows, actions, width, KIND=activation or "",
        FIRST=first, SECOND=second, EXACT=dtype is torch.float32, **launch.options(choice, x.device),
    )  # fmt: skip
    return out


@triton.jit
def _project_and_step(
    hidden_ptr, weight_ptr, bias_ptr, x_ptr, hold_ptr, out_ptr, width, actions, dt,
    BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    action = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    column = tl.arange(0, BLOCK_K)
    wanted, held = action < actions, column < width
    weight_at = weight_ptr + action[:, None] * width + column[None, :]
    weight = tl.load(weight_at, mask=wanted[:, None] & held[None, :], other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + action, mask=wanted, other=0.0).to(tl.float32)
    if hold_ptr is not None:
        hold = tl.load(hold_ptr + row)
    release_successor(PDL)
    wait_for_producer(PDL)
    hidden = tl.load(hidden_ptr + row * width + column, mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * actions + action, mask=wanted, other=0.0)
    velocity = tl.sum(weight * hidden[None, :], axis=1) + bias
    moved = x + dt * velocity
    if hold_ptr is not None:  # from either end, so that 0 and 1 change no bit of the one that is left
        moved = tl.where(hold < 0.5, moved + hold * (x - moved), x - (1.0 - hold) * (x - moved))
    tl.store(out_ptr + row * actions + action, moved, mask=wanted)


def project_and_step(
    hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float, hold: Tensor | None = None
) -> Tensor:
    """See kernels.euler."""
    actions, width = weight.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    choice = launch.choose(TABLE, (width, actions), x.device)
    grid = (hidden.numel() // width, triton.cdiv(actions, choice["BLOCK_A"]))
    _project_and_step[grid](
        hidden.contiguous(), weight.contiguous(), bias, x.contiguous(), hold, out, width, actions, dt,
        BLOCK_K=launch.power_of_two(width), **launch.options(choice, x.device),
    )  # fmt: skip
    return out


@triton.jit
def _guide(
    x_ptr, moved_ptr, previous_ptr, weight_ptr, prefix_ptr, out_ptr, elements, tokens, actions, pull, ahead,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < elements
    previous = tl.load(previous_ptr + at, mask=held, other=0.0)
    row = at // actions
    weight = tl.load(weight_ptr + row, mask=held, other=0.0)
    given = row % tokens < tl.load(prefix_ptr + row // tokens, mask=held, other=0)
    release_successor(PDL)
    wait_for_producer(PDL)
    x = tl.load(x_ptr + at, mask=held, other=0.0)
    moved = tl.load(moved_ptr + at, mask=held, other=0.0)
    foreseen = x - ahead * (moved - x)
    pulled = moved - pull * weight * (previous - foreseen)
    tl.store(out_ptr + at, tl.where(given, previous, pulled), mask=held)


def guide(
    x: Tensor, moved: Tensor, previous: Tensor, weight: Tensor, prefix: Tensor, gain: float, time: float, dt: float
) -> Tensor:
    """See kernels.euler."""
    out = torch.empty_like(moved)
    if out.numel() == 0:
        return out
    choice = launch.choose(GUIDE, (x.numel(),), x.device)
    grid = (triton.cdiv(x.numel(), choice["BLOCK"]),)
    _guide[grid](
        x.contiguous(), moved, previous, weight, prefix, out, x.numel(), x.shape[1], x.shape[2], dt * gain, time / dt,
        **launch.options(choice, x.device),
    )  # fmt: skip
    return out


@triton.jit
def _impose(
    x_ptr, previous_ptr, prefix_ptr, out_ptr, elements, tokens, actions, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < elements
    row = at // actions
    release_successor(PDL)
    wait_for_producer(PDL)
    given = row % tokens < tl.load(prefix_ptr + row // tokens, mask=held, other=0)
    previous = tl.load(previous_ptr + at, mask=held & given, other=0.0)
    x = tl.load(x_ptr + at, mask=held, other=0.0)
    tl.store(out_ptr + at, tl.where(given, previous, x), mask=held)


def impose(x: Tensor, previous: Tensor, prefix: Tensor) -> Tensor:
    """See kernels.euler."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    choice = launch.choose(GUIDE, (x.numel(),), x.device)
    grid = (triton.cdiv(x.numel(), choice["BLOCK"]),)
    _impose[grid](
        x.contiguous(), previous, prefix, out, x.numel(), x.shape[1], x.shape[2], **launch.options(choice, x.device)
    )
    return out
