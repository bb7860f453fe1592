"""Linear layers of several inputs at once, each with a weight and bias of its own, few rows each: weights bound it.

torch's `baddbmm` copies the bias into every row of the result and reads it back. Here a program multiplies all rows of
a layer where it can, so that a weight is read once; the rows are two tiles, since 192 is no power of two.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from innerloop.kernels import launch
from innerloop.kernels.activation import triton as activation_triton
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table

LIBRARY = Launch.of(0)


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    if choice == LIBRARY:
        return 0
    return (_rows(choice) + choice["BLOCK_N"]) * choice["BLOCK_K"] * 2 * choice.stages + 1024


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Rows of 16-bit values that bulk copies can read; at most two programs a weight, which have less than 64 rows too many.

    Tiles of 128 columns and more where they nearly fill the device.
    """
    layers, rows, columns, inner, element = shape
    if choice == LIBRARY:
        return True
    held, tiles = _rows(choice), triton.cdiv(rows, _rows(choice))
    if choice["BLOCK_N"] >= 128 and not limits.nearly_full(layers * tiles * triton.cdiv(columns, choice["BLOCK_N"])):
        return False
    return element == 2 and inner % 8 == 0 and tiles <= 2 and tiles * held < rows + 64


def _rows(choice: Launch) -> int:
    return choice["BLOCK_M"] + choice["BLOCK_R"]


def _tile(warps: int, stages: int, rows: int, rest: int, columns: int, inner: int = 64) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_R=rest, BLOCK_N=columns, BLOCK_K=inner)


TABLE = Table(
    "linear.batched",
    default=[LIBRARY],
    rows={
        90: [
            _tile(8, 5, 128, 64, 128),
            _tile(4, 2, 128, 64, 128),
            _tile(16, 4, 128, 64, 256),
            _tile(4, 3, 128, 64, 64),
            _tile(8, 5, 128, 0, 128),
            _tile(4, 6, 64, 0, 64),
            _tile(8, 4, 128, 0, 256),
            _tile(8, 3, 128, 0, 128),
            _tile(8, 4, 64, 0, 256),
            _tile(4, 4, 64, 0, 128),
            LIBRARY,
        ]
    },
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _store(acc, bias, out_at, stride, row, column, rows, columns, KIND: tl.constexpr):
    """A tile of a layer's result."""
    held = (row < rows)[:, None] & (column < columns)[None, :]
    at = out_at + row.to(tl.int64)[:, None] * stride + column[None, :]
    y = acc + bias[None, :]
    if KIND != "":
        y = activation_triton.activated(y, KIND)
    tl.store(at, y.to(at.dtype.element_ty), mask=held)


@triton.jit
def _batched(
    x_desc, rest_desc, w_desc, bias_ptr, out_ptr, rows, columns, out_layer, out_row,
    INNER: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(2)
    first, left = tl.program_id(0) * (BLOCK_M + BLOCK_R), tl.program_id(1) * BLOCK_N
    column = left + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + layer * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    # Beyond a layer's last row or column lie the next layer's, whose products are not stored.
    x_row, w_row = layer * rows + first, layer * columns + left
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCK_R:
        acc_rest = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    release_successor(PDL)
    wait_for_producer(PDL)
    for at in range(0, INNER, BLOCK_K):
        w = tl.trans(w_desc.load([w_row, at]))
        acc = dot(x_desc.load([x_row, at]), w, acc)
        if BLOCK_R:
            acc_rest = dot(rest_desc.load([x_row + BLOCK_M, at]), w, acc_rest)
    out_at = out_ptr + layer.to(tl.int64) * out_layer
    row = first + tl.arange(0, BLOCK_M)
    _store(acc, bias, out_at, out_row, row, column, rows, columns, KIND)
    if BLOCK_R:
        row = first + BLOCK_M + tl.arange(0, BLOCK_R)
        _store(acc_rest, bias, out_at, out_row, row, column, rows, columns, KIND)


def batched(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """See kernels.linear."""
    layers, rows, inner = x.shape
    columns = weight.shape[0] // layers
    choice = launch.choose(TABLE, (layers, rows, columns, inner, x.element_size()), x.device)
    if choice == LIBRARY or not _readable(x, weight) or (out is not None and out.stride(2) != 1):
        operands = bias.view(layers, 1, -1), x, weight.view(layers, -1, inner).transpose(1, 2)
        if activation is None:
            return torch.baddbmm(*operands, out=out)
        y = activation_triton.activate(torch.baddbmm(*operands), activation)
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty((layers, rows, columns), dtype=x.dtype, device=x.device)
    m, r, n, k = (choice[size] for size in ("BLOCK_M", "BLOCK_R", "BLOCK_N", "BLOCK_K"))
    every = x.view(layers * rows, inner)
    _batched[(triton.cdiv(rows, m + r), triton.cdiv(columns, n), layers)](
        TensorDescriptor.from_tensor(every, [m, k]), TensorDescriptor.from_tensor(every, [r, k]) if r else None,
        TensorDescriptor.from_tensor(weight, [n, k]), bias, out, rows, columns, *out.stride()[:2], INNER=inner,
        KIND=activation or "", **launch.options(choice, x.device),
    )  # fmt: skip
    return out


def _readable(x: Tensor, weight: Tensor) -> bool:
    """Whole matrices that start at multiples of 16 bytes."""
    return all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight))
