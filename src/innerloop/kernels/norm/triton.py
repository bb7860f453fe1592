"""One kernel for every norm: a row stays in registers from the residual add to the rounding."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import given_or_usual, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Eight bytes a load or sixteen: four to sixteen elements a thread, fewer only in the narrowest rows."""
    return choice.warps in (1, 16) or 4 <= shape[0] // (32 * choice.warps) <= 16


TABLE = Table(
    "norm", default=[Launch.of(w) for w in (2, 4, 8, 16, 1)], rows={90: [Launch.of(8), Launch.of(4)]}, suits=_suits
)


@triton.jit
def _operand(ptr, stride, row, tokens, column, width, prefix_ptr, PREFIXED: tl.constexpr):
    """Of [D] or [B, 1, D], or of [2, D] under a prefix, what this row takes; fp32, zeros where there is none."""
    entry = row // tokens
    if ptr is None:
        value = tl.zeros_like(column).to(tl.float32)
    elif PREFIXED:
        value = given_or_usual(ptr, stride, column, width, row % tokens < tl.load(prefix_ptr + entry))
    else:
        value = tl.load(ptr + entry * stride + column, mask=column < width, other=0.0).to(tl.float32)
    return value


@triton.jit
def _norm(
    x_ptr, delta_ptr, delta_bias_ptr, gate_ptr, scale_ptr, shift_ptr, prefix_ptr, total_ptr, out_ptr,
    tokens, width, delta_rows, share_stride, gate_stride, scale_stride, shift_stride, eps,
    REPEATED: tl.constexpr, LEAD: tl.constexpr, SHARES: tl.constexpr, CENTRED: tl.constexpr, PLUS_ONE: tl.constexpr,
    PREFIXED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < width
    # What no kernel of a chain writes is there when the row is: behind its reductions a load would take its whole latency.
    bias = _operand(delta_bias_ptr, 0, row, tokens, column, width, prefix_ptr, False)
    gate = _operand(gate_ptr, gate_stride, row, tokens, column, width, prefix_ptr, PREFIXED)
    scale = _operand(scale_ptr, scale_stride, row, tokens, column, width, prefix_ptr, PREFIXED)
    shift = _operand(shift_ptr, shift_stride, row, tokens, column, width, prefix_ptr, PREFIXED)
    release_successor(PDL)
    wait_for_producer(PDL)
    x = tl.load(x_ptr + row * width + column, mask=held, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        delta_row = row % delta_rows if REPEATED else row
        added = held
        if LEAD > 0:
            delta_row = row - (row // tokens + 1) * LEAD
            added = held & (row % tokens >= LEAD)
        delta_at = delta_ptr + delta_row * width + column
        delta = tl.load(delta_at, mask=added, other=0.0).to(tl.float32)
        for share in tl.static_range(1, SHARES):
            delta += tl.load(delta_at + share * share_stride, mask=added, other=0.0).to(tl.float32)
        delta += tl.where(added, bias, 0.0)
        if gate_ptr is not None:
            delta = gate * delta
        total = (x + delta).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, total, mask=held)
        x = total.to(tl.float32)
    if CENTRED:
        x = tl.where(held, x - tl.sum(x, axis=0) / width, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    if scale_ptr is not None:
        y = y * (1.0 + scale) if PLUS_ONE else y * scale
    if shift_ptr is not None:
        y = y + shift
    tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _gated_add(
    x_ptr, delta_ptr, gate_ptr, prefix_ptr, out_ptr, tokens, width, share_stride, gate_stride,
    SHARES: tl.constexpr, PREFIXED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < width
    release_successor(PDL)
    wait_for_producer(PDL)
    x = tl.load(x_ptr + row * width + column, mask=held, other=0.0).to(tl.float32)
    delta_at = delta_ptr + row * width + column
    delta = tl.load(delta_at, mask=held, other=0.0).to(tl.float32)
    for share in tl.static_range(1, SHARES):
        delta += tl.load(delta_at + share * share_stride, mask=held, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        delta = delta * _operand(gate_ptr, gate_stride, row, tokens, column, width, prefix_ptr, PREFIXED)
    tl.store(out_ptr + row * width + column, (x + delta).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _layer_norms(
    inputs, weight_ptr, bias_ptr, out_ptr, rows, width, eps,
    LAYERS: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    held = column < width
    x_ptr = inputs[0]
    for i in tl.static_range(1, LAYERS):
        if layer == i:
            x_ptr = inputs[i]
    own = (layer - PLAIN) * width + column
    scale = tl.load(weight_ptr + own, mask=held & (layer >= PLAIN), other=0.0).to(tl.float32)
    shift = tl.load(bias_ptr + own, mask=held & (layer >= PLAIN), other=0.0).to(tl.float32)
    release_successor(PDL)
    wait_for_producer(PDL)
    x = tl.load(x_ptr + row * width + column, mask=held, other=0.0).to(tl.float32)
    centred = tl.where(held, x - tl.sum(x, axis=0) / width, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps) * scale + shift
    if layer < PLAIN:
        y = x
    tl.store(out_ptr + (layer * rows + row) * width + column, y.to(out_ptr.dtype.element_ty), mask=held)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    """See kernels.norm."""
    return _run(x, (None, None), (None, weight, None), eps, plus_one)[1]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See kernels.norm."""
    return _run(x, (None, None), (None, weight, bias), eps, False, centred=True)[1]


def layer_norms(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor, eps: float, plain: int = 0) -> Tensor:
    """See kernels.norm."""
    x = inputs[0]
    width, layers = x.shape[-1], len(inputs)
    rows, block = x.numel() // width, launch.power_of_two(width)
    out = torch.empty((layers, *x.shape), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    _layer_norms[(rows, layers)](
        tuple(t.contiguous() for t in inputs), weight.contiguous(), bias.contiguous(), out, rows, width, eps,
        LAYERS=layers, PLAIN=plain, BLOCK=block, **launch.options(launch.choose(TABLE, (block,), x.device), x.device),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    eps: float,
    plus_one: bool = False,
    delta_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.norm."""
    return _run(x, (delta, delta_bias), (None, weight, None), eps, plus_one)


def add_layer_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    delta_bias: Tensor | None = None,
    lead: int = 0,
) -> tuple[Tensor, Tensor]:
    """See kernels.norm."""
    return _run(x, (delta, delta_bias), (None, weight, bias), eps, False, centred=True, lead=lead)


def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, prefix: Tensor | None = None
) -> Tensor:
    """See kernels.norm."""
    return _run(x, (None, None), (None, scale, shift), eps, True, prefix=prefix)[1]


def gated_add(x: Tensor, delta: Tensor, gate: Tensor | None, prefix: Tensor | None = None) -> Tensor:
    """See kernels.norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    width, tokens = x.shape[-1], x.shape[-2]
    block = launch.power_of_two(width)
    gate, stride = (None, 0) if gate is None else _rows(gate)
    shares = delta.shape[0] if delta.dim() > x.dim() else 1
    _gated_add[(x.numel() // width,)](
        x.contiguous(), delta.contiguous(), gate, prefix, out, tokens, width, x.numel(), stride,
        SHARES=shares, PREFIXED=prefix is not None, BLOCK=block, **launch.options(launch.choose(TABLE, (block,), x.device), x.device),
    )  # fmt: skip
    return out


def gated_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.norm."""
    return _run(x, (delta, None), (gate, scale, shift), eps, True, prefix=prefix)


def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """See kernels.norm."""
    return _run(x, (None, None), (None, scale, shift), eps, True, centred=True)[1]


def _run(
    x: Tensor,
    added: tuple[Tensor | None, Tensor | None],
    modulation: tuple[Tensor | None, Tensor | None, Tensor | None],
    eps: float,
    plus_one: bool,
    centred: bool = False,
    prefix: Tensor | None = None,
    lead: int = 0,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    delta, delta_bias = added
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    if rows == 0:
        return total, out
    (gate, gate_stride), (scale, scale_stride), (shift, shift_stride) = (
        (None, 0) if t is None else _rows(t) for t in modulation
    )
    shares = delta.shape[0] if delta is not None and delta.dim() > x.dim() else 1
    delta_rows = rows if delta is None else delta.numel() // (shares * width)
    block = launch.power_of_two(width)
    choice = launch.choose(TABLE, (block,), x.device)
    _norm[(rows,)](
        x.contiguous(), None if delta is None else delta.contiguous(), delta_bias, gate, scale, shift, prefix,
        total, out,
        rows // x.shape[0] if x.dim() > 2 else rows, width, delta_rows, delta_rows * width,
        gate_stride, scale_stride, shift_stride, eps, REPEATED=not lead and delta_rows < rows, LEAD=lead, SHARES=shares,
        CENTRED=centred, PLUS_ONE=plus_one, PREFIXED=prefix is not None, BLOCK=block, **launch.options(choice, x.device),
    )  # fmt: skip
    return total, out


def _rows(t: Tensor) -> tuple[Tensor, int]:
    """A [D], [B, 1, D] or [2, D] operand and its stride from one batch entry or row to the next."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    return t, t.stride(0) if t.dim() > 1 and t.shape[0] > 1 else 0
