"""Products whose columns are needed two by two: gate and up of a gated unit, the halves of a head that is rotated.

Within `launch.dependent_launch` a program makes both columns of its pairs, in an accumulator each over one tile of
rows, and its epilogue is the op that would be the next kernel. Elsewhere the product is `linear`'s, and that op follows.
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
from innerloop.kernels.linear import rings
from innerloop.kernels.linear.reference import few_rows

APART = Launch.of(0)  # the product, then the op


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    if choice == APART:
        return 0
    if rings.is_rings(choice):
        return rings.shared_bytes(choice)
    return (choice["BLOCK_M"] + 2 * choice["BLOCK_N"]) * choice["BLOCK_K"] * 2 * choice.stages + 1024


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Aligned 16-bit rows; whole tiles of a head's half; no program waits for another's place."""
    rows, pairs, half, inner, element = shape
    if choice == APART:
        return True
    if rings.is_rings(choice):
        busy = limits.nearly_full(rings.programs(choice, rows, pairs, gated=True))
        return element == 2 and busy and rings.suits(choice, rows, pairs, inner, limits, gated=True)
    tiles = triton.cdiv(rows, choice["BLOCK_M"]) * triton.cdiv(pairs, choice["BLOCK_N"])
    return element == 2 and inner % 8 == 0 and half % choice["BLOCK_N"] == 0 and tiles <= limits.multiprocessors


def _tile(warps: int, stages: int, rows: int, columns: int, inner: int = 128) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=inner)


# Of rings.py; in chains they stand behind the others, for `innerloop tune`.
FEW_ROWS = [rings.tile(1, width, depth=2) for width in (64, 80)]
MANY_ROWS = [rings.tile(3, width) for width in (96, 160)]
GATED = Table(
    "linear.gated",
    default=[APART],
    rows={
        90: [_tile(4, 4, 64, 32), _tile(4, 3, 64, 32), _tile(4, 5, 64, 32, 64), _tile(8, 4, 64, 64), APART, *FEW_ROWS]
    },
    shared_bytes=_shared_bytes,
    suits=_suits,
)
WIDE = Table(
    "linear.gated_wide",
    default=[APART],
    rows={90: [*MANY_ROWS, APART]},
    shared_bytes=_shared_bytes,
    suits=_suits,
)
ROTATED = Table(
    "linear.rotated",
    default=[APART],
    rows={90: [_tile(4, 4, 64, 16), _tile(4, 3, 64, 16), _tile(4, 4, 64, 32), _tile(4, 3, 64, 32), APART]},
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _pairs(
    x_desc, w_desc, first, left, apart,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns left .. left + BLOCK_N of a product, and those `apart` columns on; what lies outside is zero."""
    a, b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, INNER, BLOCK_K):
        x = x_desc.load([first, at])
        w_a, w_b = w_desc.load([left, at]), w_desc.load([left + apart, at])
        a = dot(x, tl.trans(w_a), a)
        b = dot(x, tl.trans(w_b), b)
    return a, b


@triton.jit
def _gated(
    x_desc, w_desc, out_ptr, rows, width,
    INNER: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first, left = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    row, column = first + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    release_successor(PDL)
    wait_for_producer(PDL)
    gate, up = _pairs(x_desc, w_desc, first, left, width, INNER, BLOCK_M, BLOCK_N, BLOCK_K)
    y = activation_triton.activated(gate, KIND) * up
    at = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit
def _rotated(
    x_desc, w_desc, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    rows, tokens, start, cos_batch, cos_token, k_batch, k_token, k_head, v_batch, v_token, v_head,
    INNER: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PER_HEAD: tl.constexpr = HALF // BLOCK_N
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1) // PER_HEAD
    lane = (tl.program_id(1) % PER_HEAD) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    real = (row < rows)[:, None] & (lane < HALF)[None, :]
    batch, position = row // tokens, row % tokens
    wait_for_producer(PDL)
    release_successor(PDL)  # behind the wait: attention may read ahead what was written before
    angle = (batch * cos_batch + position * cos_token)[:, None] + lane[None, :]
    turned = (row < rows)[:, None] & (lane < tl.where(head < HEADS + KV_HEADS, HALF, 0))[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    left = head * 2 * HALF + (tl.program_id(1) % PER_HEAD) * BLOCK_N
    a, b = _pairs(x_desc, w_desc, first, left, HALF, INNER, BLOCK_M, BLOCK_N, BLOCK_K)
    a, b = a * cos - b * sin, b * cos + a * sin
    batch, place = batch.to(tl.int64), (start + position).to(tl.int64)
    if head < HEADS:
        at = q_ptr + row.to(tl.int64) * (HEADS * 2 * HALF) + head * (2 * HALF)
    elif head < HEADS + KV_HEADS:
        at = k_ptr + batch * k_batch + place * k_token + (head - HEADS) * k_head
    else:
        at = v_ptr + batch * v_batch + place * v_token + (head - HEADS - KV_HEADS) * v_head
    at = at[:, None] + lane[None, :]
    tl.store(at, a.to(at.dtype.element_ty), mask=real)
    tl.store(at + HALF, b.to(at.dtype.element_ty), mask=real)


def in_chain(rows: Tensor) -> bool:
    """Whether a product stands in a chain of dependent launches that a library kernel would keep up."""
    return launch.dependent() and few_rows(rows)


def gated(x: Tensor, weight: Tensor, kind: Activation) -> Tensor | None:
    """One kernel for activation(gate) * up, or None where the product and the unit are better apart."""
    rows, width = x.reshape(-1, x.shape[-1]), weight.shape[0] // 2
    table = GATED if in_chain(rows) else WIDE
    choice = _choose(table, rows, weight, width, 1 << 30)
    if choice == APART:
        return None
    if rings.is_rings(choice):
        return rings.product(rows, weight, None, choice, kind, gated=True).view(*x.shape[:-1], width)
    m, n, k = (choice[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(rows.shape[0], m), triton.cdiv(width, n))](
        *_described(rows, weight, m, n, k), out, rows.shape[0], width,
        INNER=rows.shape[1], KIND=kind, **launch.options(choice, x.device),
    )  # fmt: skip
    return out


def rotated(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
) -> Tensor | None:
    """One kernel for product, rotation and K/V write, or None where they are better apart."""
    batch, tokens, inner = x.shape
    rows, dim = x.reshape(-1, inner), k_cache.shape[-1]
    if not in_chain(rows):
        return None
    choice = _choose(ROTATED, rows, weight, weight.shape[0] // 2, dim // 2)
    if choice == APART or cos.stride(-1) != 1 or cos.stride() != sin.stride():
        return None
    m, n, k = (choice[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    q = torch.empty((batch, tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotated[(triton.cdiv(rows.shape[0], m), weight.shape[0] // 2 // n)](
        *_described(rows, weight, m, n, k), cos, sin, q, k_cache, v_cache,
        rows.shape[0], tokens, start, cos.stride(0), cos.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        INNER=inner, HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, **launch.options(choice, x.device),
    )  # fmt: skip
    return q


def _choose(table: Table, rows: Tensor, weight: Tensor, pairs: int, half: int) -> Launch:
    if rows.numel() == 0 or weight.dtype is not rows.dtype:
        return APART
    return launch.choose(table, (rows.shape[0], pairs, half, rows.shape[1], rows.element_size()), rows.device)


def _described(x: Tensor, weight: Tensor, m: int, n: int, k: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    return TensorDescriptor.from_tensor(x, [m, k]), TensorDescriptor.from_tensor(weight, [n, k])
