"""Linear layers on the device: cuBLASLt's, and a tensor-core kernel for what it does badly.

That is rows it cannot read 16 bytes at a time (an inner width that is no multiple of 8); products with fewer tiles
than multiprocessors, whose inner dimension is split into shares that the following norm adds (`deferred`); and few rows
within `launch.dependent_launch`, where a library kernel would start only after its predecessor's end. Where a table
says so, a product runs on the tiles of rings.py instead.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from innerloop.kernels import launch
from innerloop.kernels.activation import triton as activation_triton
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table
from innerloop.kernels.linear import pairs, rings
from innerloop.kernels.linear.batch import batched as batched
from innerloop.kernels.rope import triton as rope_triton
from innerloop.kernels.select import unfused


def _tile(warps: int, stages: int, rows: int, columns: int, split: int = 1, inner: int = 64, bulk: int = 1) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=inner, SPLIT=split, BULK=bulk)


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    if not choice.warps:
        return 0
    if rings.is_rings(choice):
        return rings.shared_bytes(choice)
    return (choice["BLOCK_M"] + choice["BLOCK_N"]) * choice["BLOCK_K"] * shape[3] * choice.stages + 1024


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Shares of narrow products, 1024 deep or more, that start at multiples of 128 bytes; own tiles fill a device once.

    Where the result is wider than the product is deep, reading the shares costs more than the device's idle part.
    Shallower shares only by the tile for them, where its programs nearly fill the device.
    The library in quarters is for one tile of rows times a sum so deep that halves of it are still long; so are tiles of
    rings.py in shares of many rows, and those are taken where they nearly fill the device. Of these, tiles of 144 columns
    where they divide the result; tiles of three times 64 rows of a whole product where that is all rows.
    """
    if rings.is_rings(choice):
        full = limits.nearly_full(_programs(choice, shape))
        return full and _suits_measured(choice, shape) and _suits_rings(choice, shape, limits)
    columns, inner, element = shape[1:]
    split = choice["SPLIT"]
    if choice == QUARTERS and (shape[0] > 256 or inner < 8192):
        return False
    if choice == SHALLOW:
        nearly = limits.nearly_full(_programs(choice, shape))
        return columns <= inner < 1024 * split and nearly and _fills_once(choice, shape, limits)
    if split > 1 and inner < max(1024 * split, columns):
        return False
    if not choice.warps:
        return split == 1 or inner * element % (128 * split) == 0
    return inner * element % 16 == 0 and _programs(choice, shape) <= limits.multiprocessors


def _suits_measured(choice: Launch, shape: Shape) -> bool:
    """Where a tile of rings.py was the faster one, of those that suit."""
    rows, columns, inner, _ = shape
    if inner < LEAST_INNER.get(choice, 0) or (choice in NARROW and columns % choice["WIDTH"]):
        return False
    return choice not in ONE_TILE or rows <= 64 * rings.groups_of(choice)


def _suits_rings(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """What the kernel takes, in shares of 256 or more. 16 bits are bfloat16: of others nothing asks a table with these."""
    rows, columns, inner, element = shape
    deep = inner >= 256 * choice["SPLIT"]
    return element == 2 and deep and rings.suits(choice, rows, columns, inner, limits)


def _suits_chain(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """As `_suits`, but own tiles in shares of any depth; in eighths where those nearly fill the device.

    Of rings.py, the wide tile where it has programs for half of the device: of narrower ones each reads all rows too.
    """
    if rings.is_rings(choice):
        wide = choice != WIDE_TILE or 2 * _programs(choice, shape) >= limits.multiprocessors
        return wide and _suits_rings(choice, shape, limits)
    if choice == EIGHTHS and (not limits.nearly_full(_programs(choice, shape)) or shape[2] < 4096):
        return False
    return _fills_once(choice, shape, limits) if choice.warps else _suits(choice, shape, limits)


def _fills_once(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Aligned rows of 16 bits; shares of 256 or more, none of them empty; no program waits for another's place."""
    inner, split = shape[2], choice["SPLIT"]
    steps = triton.cdiv(inner, choice["BLOCK_K"])
    deep = split == 1 or (inner >= 256 * split and (split - 1) * triton.cdiv(steps, split) < steps)
    return shape[3] == 2 and inner % 8 == 0 and deep and _programs(choice, shape) <= limits.multiprocessors


def _programs(choice: Launch, shape: Shape) -> int:
    if rings.is_rings(choice):
        return rings.programs(choice, shape[0], shape[1], gated=False)
    tiles: int = triton.cdiv(shape[0], choice["BLOCK_M"]) * triton.cdiv(shape[1], choice["BLOCK_N"])
    return tiles * choice["SPLIT"]


def _library(split: int) -> Launch:
    return Launch.of(0, SPLIT=split)


SHALLOW = _tile(4, 4, 64, 64, 2, inner=128)
QUARTERS = _library(4)
EIGHTHS = _tile(4, 4, 64, 64, 8, inner=128)
# Tiles of rings.py. Those in shares and in chains are first where they won in whole layers (docs/LOG.md); the others stand
# behind, for `innerloop tune`.
ONE_TILE = [rings.tile(3, width) for width in (48, 64, 40)]
MANY_ROWS = [rings.tile(*sizes) for sizes in ((1, 144), (1, 96), (1, 128), (2, 112), (2, 128), (2, 136))]
DEEP = [rings.tile(3, 80, split=4), rings.tile(3, 96, split=4)]
HALVES, FOURTHS = rings.tile(1, 128, split=2), rings.tile(1, 128, split=4)
NARROW = [rings.tile(2, 144, split=4), rings.tile(1, 144, split=2), rings.tile(1, 144, split=4)]
LEAST_INNER = {**dict.fromkeys(DEEP, 6144), NARROW[0]: 4096}  # shallower, others were faster
WIDE_TILE = rings.tile(1, 48, depth=2)
CHAIN = [WIDE_TILE, rings.tile(1, 24, depth=4)]
CHAIN_SHARES = [rings.tile(1, 48, split=split, depth=2) for split in (6, 3)]

DEFERRED = Table(
    "linear.deferred",
    default=[_library(1)],
    rows={
        90: [
            *DEEP,
            HALVES,
            *NARROW,
            SHALLOW,
            FOURTHS,
            QUARTERS,
            _library(2),
            _tile(4, 5, 128, 64, 3),
            _tile(8, 5, 128, 128, 3),
            _library(1),
            _tile(4, 6, 64, 64, 4),
            _tile(4, 6, 64, 128, 4),
            _library(8),
            rings.tile(1, 120, split=2),
        ]
    },
    shared_bytes=_shared_bytes,
    suits=_suits,
)
CHAINED = Table(
    "linear.chained",
    default=[_library(1)],
    rows={90: [*CHAIN, _tile(4, 4, 64, 32, inner=128), _tile(4, 4, 64, 64, inner=128), _library(1)]},
    shared_bytes=_shared_bytes,
    suits=_suits_chain,
)
CHAINED_SHARES = Table(
    "linear.chained_shares",
    default=[_library(1)],
    rows={
        90: [
            *CHAIN_SHARES,
            EIGHTHS,
            *(_tile(4, 4, 64, 64, split, inner=128) for split in (5, 4, 3)),
            *(_tile(4, 3, 64, 64, split, inner=128) for split in (8, 4)),
            *(_tile(4, 4, 64, 32, split, inner=128) for split in (4, 3, 2)),
            _library(2),
            _library(1),
        ]
    },
    shared_bytes=_shared_bytes,
    suits=_suits_chain,
)
WHOLE = Table(
    "linear.whole",
    default=[_library(1)],
    rows={90: [*ONE_TILE, _library(1), *MANY_ROWS]},
    shared_bytes=_shared_bytes,
    suits=_suits,
)
UNALIGNED = Table(
    "linear.unaligned",
    default=[
        _tile(4, 3, 64, 128, bulk=0),
        _tile(4, 3, 128, 64, bulk=0),
        _tile(4, 3, 64, 64, inner=32, bulk=0),
        _tile(4, 2, 32, 32, inner=32, bulk=0),
    ],
    shared_bytes=_shared_bytes,
)

# What the library's products end with, as torch asks for it: CUBLASLT_EPILOGUE_GELU_BIAS is the tanh form.
EPILOGUES: dict[Activation, bool] = {"gelu_tanh": True, "relu": False}


@triton.jit
def _product(
    x_desc, w_desc, x_ptr, w_ptr, bias_ptr, out_ptr, rows, columns, per_share,
    INNER: tl.constexpr, X_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, BULK: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first, share = tl.program_id(0) * BLOCK_M, tl.program_id(2)
    left = tl.program_id(1) * BLOCK_N
    row, column, step = first + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    real, there = row < rows, column < columns
    start, end = 0, INNER
    if SPLIT > 1:
        start, end = share * per_share, tl.minimum(INNER, (share + 1) * per_share)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    release_successor(PDL)
    wait_for_producer(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(start, end, BLOCK_K):
        if BULK:
            # Beyond the last column both are zero; shares are whole steps.
            x, w = x_desc.load([first, at]), w_desc.load([left, at])
        else:
            held = at + step < end
            x_at = x_ptr + row.to(tl.int64)[:, None] * X_STRIDE + (at + step)[None, :]
            w_at = w_ptr + column.to(tl.int64)[:, None] * W_STRIDE + (at + step)[None, :]
            x = tl.load(x_at, mask=real[:, None] & held[None, :], other=0.0)
            w = tl.load(w_at, mask=there[:, None] & held[None, :], other=0.0)
        acc = dot(x, tl.trans(w), acc)
    if bias_ptr is not None:
        acc += bias
    if KIND != "":
        acc = activation_triton.activated(acc, KIND)
    out_at = out_ptr + (share * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & there[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """See kernels.linear."""
    rows = x.reshape(-1, x.shape[-1])
    if activation in (None, *EPILOGUES) and _chosen_by_shape(rows, weight):
        choice = launch.choose(CHAINED if pairs.in_chain(rows) else WHOLE, _shape(rows, weight), x.device)
        if choice.warps:
            return _own(rows, weight, bias, choice, activation).view(*x.shape[:-1], weight.shape[0])
    if activation is None:
        return _whole(x, weight, bias)
    if activation in EPILOGUES and bias is not None and _chosen_by_shape(rows, weight):
        out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=EPILOGUES[activation])
        return out.view(*x.shape[:-1], weight.shape[0])
    return activation_triton.activate(_whole(x, weight, bias), activation)


def into(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """See kernels.linear. The library writes whole rows one after another."""
    if out.is_contiguous() and weight.shape[1] * x.element_size() % 16 == 0:
        torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t(), out=out.view(-1, weight.shape[0]))
    else:
        out.copy_(linear(x, weight, bias))


def gated(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """See kernels.linear."""
    out = pairs.gated(x, weight, kind)
    return activation_triton.glu(linear(x, weight), kind) if out is None else out


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
) -> Tensor:
    """See kernels.linear."""
    q = pairs.rotated(x, weight, cos, sin, heads, kv_heads, k_cache, v_cache, start)
    if q is not None:
        return q
    return rope_triton.rotate_and_store(linear(x, weight), cos, sin, heads, kv_heads, k_cache, v_cache, start)


def deferred(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """See kernels.linear."""
    rows = x.reshape(-1, x.shape[-1])
    table = CHAINED_SHARES if _chosen_by_shape(rows, weight) and pairs.in_chain(rows) else DEFERRED
    choice = launch.choose(table, _shape(rows, weight), x.device)
    split = choice["SPLIT"]
    if choice.warps:
        sums = _own(rows, weight, None, choice)
    elif split == 1:
        sums = F.linear(rows, weight)
    else:
        shares = rows.view(rows.shape[0], split, -1).transpose(0, 1)
        sums = torch.bmm(shares, weight.view(weight.shape[0], split, -1).permute(1, 2, 0))
    return sums.view(split, *x.shape[:-1], weight.shape[0]), bias


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if x.element_size() == 2 and weight.shape[1] % 8 and rows.numel():
        out = _own(rows, weight, bias, launch.choose(UNALIGNED, _shape(rows, weight), x.device))
    elif bias is None:
        return F.linear(x, weight)
    else:
        out = torch.addmm(bias, rows, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _chosen_by_shape(rows: Tensor, weight: Tensor) -> bool:
    """Whether there is a choice for a product: aligned rows, fused kernels."""
    return weight.shape[1] % 8 == 0 and rows.numel() > 0 and not unfused(rows)


def _shape(rows: Tensor, weight: Tensor) -> Shape:
    return (rows.shape[0], weight.shape[0], weight.shape[1], rows.element_size())


def _own(
    x: Tensor, weight: Tensor, bias: Tensor | None, choice: Launch, activation: Activation | None = None
) -> Tensor:
    """Shares of the product, [SPLIT, rows, columns]; bias and activation go to a single share."""
    if rings.is_rings(choice):
        return rings.product(x, weight, bias, choice, activation)
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    split, m, n, k = (choice[size] for size in ("SPLIT", "BLOCK_M", "BLOCK_N", "BLOCK_K"))
    bulk = choice["BULK"] == 1
    out = torch.empty((split, rows, columns), dtype=x.dtype, device=x.device)
    per_share = triton.cdiv(triton.cdiv(inner, k), split) * k
    _product[(triton.cdiv(rows, m), triton.cdiv(columns, n), split)](
        TensorDescriptor.from_tensor(x, [m, k]) if bulk else None,
        TensorDescriptor.from_tensor(weight, [n, k]) if bulk else None,
        x, weight, bias, out, rows, columns, per_share, INNER=inner, X_STRIDE=x.stride(0), W_STRIDE=weight.stride(0),
        KIND=activation or "", **launch.options(choice, x.device),
    )  # fmt: skip
    return out
