"""Flash attention for few K/V heads: the query heads of a K/V head are rows of one tile, keys may be split.

A row is (query token, head within its group). Blocks of keys without a valid one are never loaded: the walk goes over
the i-th valid block, found from a running count. With SPLIT > 1 each program walks its share of the valid blocks and
a second kernel adds the shares in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from innerloop.kernels import launch
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table

LOG2_E = 1.4426950408889634
FEW_ROWS = 1024  # up to here row tiles alone do not fill a device, and keys are split


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    """Pipelined K and V tiles, and Q where the tensor cores read it from shared memory."""
    if choice == LIBRARY:
        return 0
    dim, element = shape[2:4]
    tile = (_main(dim) + _rest(dim)) * element
    return choice["BLOCK_M"] * tile + 2 * choice["BLOCK_N"] * tile * choice.stages


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """No split into more shares than blocks; accumulators of at most 128 registers a thread."""
    rows, keys, dim, element, masked = shape
    if choice == LIBRARY:
        return not masked and element == 2 and dim % 8 == 0 and limits.capability >= 90
    shares = choice["SPLIT"] <= triton.cdiv(keys, choice["BLOCK_N"])
    return shares and choice["BLOCK_M"] * dim <= 32 * choice.warps * 128 and choice["BLOCK_M"] <= max(16, 2 * rows)


def _tile(warps: int, stages: int, rows: int, keys: int, split: int = 1) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=keys, SPLIT=split)


LIBRARY = Launch.of(0)  # cuDNN's attention through torch, where nothing is masked
_ANYWHERE = [_tile(4, 1, 32, 32), _tile(4, 1, 16, 16)]

MANY = Table(
    "attention.many",
    default=[
        _tile(4, 2, 64, 64),
        _tile(4, 2, 64, 128),
        _tile(8, 2, 128, 64),
        LIBRARY,
        _tile(8, 2, 64, 128),
        _tile(4, 3, 64, 64),
        _tile(4, 2, 64, 32),
        *_ANYWHERE,
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)
WIDE = Table(
    "attention.wide",
    default=[
        _tile(8, 2, 64, 64),
        _tile(4, 2, 64, 64),
        _tile(8, 2, 128, 64),
        _tile(8, 3, 64, 32),
        _tile(8, 2, 64, 64, 2),
        _tile(8, 2, 128, 64, 3),
        _tile(8, 2, 64, 32),
        _tile(4, 2, 64, 32),
        _tile(8, 1, 64, 32),
        *_ANYWHERE,
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)
FEW = Table(
    "attention.few",
    default=[
        _tile(4, 1, 16, 64, 12),
        _tile(4, 2, 16, 32, 24),
        _tile(4, 2, 16, 32, 12),
        _tile(4, 1, 16, 32, 16),
        _tile(4, 2, 64, 32, 16),
        _tile(4, 1, 64, 64, 12),
        _tile(2, 1, 16, 32, 16),
        _tile(4, 1, 16, 64, 8),
        _tile(4, 1, 16, 32, 8),
        _tile(4, 1, 16, 32, 4),
        _tile(4, 1, 16, 16, 2),
        _tile(4, 1, 16, 16),
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)
COMBINE = Table("attention.combine", default=[Launch.of(4), Launch.of(2), Launch.of(8)])


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, valid_ptr, out_ptr, stats_ptr, rows, tokens, keys,
    q_batch, q_token, k_batch, k_token, v_batch, v_token, valid_batch, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(1) % KV_HEADS
    share = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    main, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    key = tl.arange(0, BLOCK_N)
    real = row < rows
    wait_for_producer(PDL)
    q_at = q_ptr + (batch * q_batch + token.to(tl.int64) * q_token + head * Q_HEAD)[:, None]
    q = tl.load(q_at + main[None, :], mask=real[:, None] & (main < DIM)[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if REST > 1:
        q_rest = tl.load(q_at + rest[None, :], mask=real[:, None] & (rest < DIM)[None, :], other=0.0)
        acc_rest = tl.zeros((BLOCK_M, REST), tl.float32)
    k_at = k_ptr + batch * k_batch + kv_head * K_HEAD
    v_at = v_ptr + batch * v_batch + kv_head * V_HEAD
    last = keys - 1
    if CAUSAL:
        last = tl.minimum(last, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + keys - tokens)
    if valid_ptr is not None:
        # running[j]: valid blocks among 0 .. j, so that the i-th valid block is the number of j with running[j] <= i.
        block = tl.arange(0, BLOCKS)
        every = block[:, None] * BLOCK_N + key[None, :]
        valid_at = valid_ptr + batch * valid_batch
        any_valid = tl.max(tl.load(valid_at + every, mask=every <= last, other=0), axis=1) != 0
        running = tl.cumsum(any_valid.to(tl.int32), axis=0)
        count = tl.sum(any_valid.to(tl.int32), axis=0)
    else:
        count = tl.maximum(last + BLOCK_N, 0) // BLOCK_N
    per_share = (count + SPLIT - 1) // SPLIT
    # Finite before the first key, so that masked minus masked is not NaN.
    maximum = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for i in range(share * per_share, tl.minimum(count, (share + 1) * per_share)):
        if valid_ptr is not None:
            at = tl.sum((running <= i).to(tl.int32), axis=0) * BLOCK_N + key
            seen = tl.load(valid_at + at, mask=at < keys, other=0) != 0
        else:
            at = i * BLOCK_N + key
            seen = at < keys
        k_rows = k_at + at.to(tl.int64)[:, None] * k_token
        v_rows = v_at + at.to(tl.int64)[:, None] * v_token
        k = tl.load(k_rows + main[None, :], mask=seen[:, None] & (main < DIM)[None, :], other=0.0)
        v = tl.load(v_rows + main[None, :], mask=seen[:, None] & (main < DIM)[None, :], other=0.0)
        score = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if REST > 1:
            k_rest = tl.load(k_rows + rest[None, :], mask=seen[:, None] & (rest < DIM)[None, :], other=0.0)
            score = dot(q_rest, tl.trans(k_rest), score)
        visible = seen[None, :] & real[:, None]
        if CAUSAL:
            visible = visible & (at[None, :] <= token[:, None] + (keys - tokens))
        score = tl.where(visible, score * scale, float("-inf"))
        raised = tl.maximum(maximum, tl.max(score, axis=1))
        weight = tl.exp2(score - raised[:, None])
        shrink = tl.exp2(maximum - raised)
        total = total * shrink + tl.sum(weight, axis=1)
        maximum = raised
        weight = weight.to(v_ptr.dtype.element_ty)
        acc = dot(weight, v, acc * shrink[:, None])
        if REST > 1:
            v_rest = tl.load(v_rows + rest[None, :], mask=seen[:, None] & (rest < DIM)[None, :], other=0.0)
            acc_rest = dot(weight, v_rest, acc_rest * shrink[:, None])
    release_successor(PDL)
    if SPLIT == 1:
        inverse = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
        acc = acc * inverse
        if REST > 1:
            acc_rest = acc_rest * inverse
        line = (batch * tokens + token) * (KV_HEADS * GROUP) + head
    else:
        line = (share * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * rows + row
        tl.store(stats_ptr + line * 2, maximum, mask=real)
        tl.store(stats_ptr + line * 2 + 1, total, mask=real)
    out_at = out_ptr + line.to(tl.int64)[:, None] * DIM
    kind = out_ptr.dtype.element_ty
    tl.store(out_at + main[None, :], acc.to(kind), mask=real[:, None] & (main < DIM)[None, :])
    if REST > 1:
        tl.store(out_at + rest[None, :], acc_rest.to(kind), mask=real[:, None] & (rest < DIM)[None, :])


@triton.jit
def _combine(
    part_ptr, stats_ptr, out_ptr, rows, tokens, lines,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row, unit = line % rows, line // rows
    column, share = tl.arange(0, BLOCK_D), tl.arange(0, SHARES)
    held = column < DIM
    wait_for_producer(PDL)
    at = share * lines + line
    maximum = tl.load(stats_ptr + at * 2, mask=share < SPLIT, other=-1.0e30)
    total = tl.load(stats_ptr + at * 2 + 1, mask=share < SPLIT, other=0.0)
    part = tl.load(
        part_ptr + at[:, None] * DIM + column[None, :], mask=(share < SPLIT)[:, None] & held[None, :], other=0.0
    )
    weight = tl.exp2(maximum - tl.max(maximum, axis=0))
    sum_of_weights = tl.sum(weight * total, axis=0)
    value = tl.sum(part * weight[:, None], axis=0) / tl.where(sum_of_weights > 0.0, sum_of_weights, 1.0)
    release_successor(PDL)
    batch, kv_head = unit // KV_HEADS, unit % KV_HEADS
    place = (batch * tokens + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(out_ptr + place * DIM + column, value.to(out_ptr.dtype.element_ty), mask=held)


def attention(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """See kernels.attention."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    rows = tokens * (heads // kv_heads)
    many = WIDE if dim > 128 else MANY
    table = FEW if rows * batch * kv_heads <= FEW_ROWS and keys > 64 else many
    masked = causal or key_valid is not None
    choice = launch.choose(table, (rows, keys, dim, q.element_size(), int(masked)), q.device)
    if choice == LIBRARY:
        return _library(q, k, v, scale)
    split = choice["SPLIT"]
    out = torch.empty((batch, tokens, heads * dim), dtype=q.dtype, device=q.device)
    lines = batch * kv_heads * rows
    part, stats = out, None
    if split > 1:
        part = torch.empty((split, lines, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((split, lines, 2), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(rows, choice["BLOCK_M"]), batch * kv_heads, split)
    _attend[grid](
        q, k, v, key_valid, part, stats, rows, tokens, keys,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], 0 if key_valid is None else key_valid.stride(0),
        scale * LOG2_E, Q_HEAD=q.stride(2), K_HEAD=k.stride(2), V_HEAD=v.stride(2),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, MAIN=_main(dim), REST=_rest(dim),
        CAUSAL=causal, BLOCKS=launch.power_of_two(triton.cdiv(keys, choice["BLOCK_N"])),
        **launch.options(choice, q.device),
    )  # fmt: skip
    if split > 1:
        _add_shares(part, stats, out, (rows, tokens, split), (kv_heads, heads // kv_heads, dim))
    return out


def _add_shares(
    part: Tensor, stats: Tensor | None, out: Tensor, sizes: tuple[int, int, int], heads: tuple[int, int, int]
) -> None:
    rows, tokens, split = sizes
    kv_heads, group, dim = heads
    choice = launch.choose(COMBINE, (rows, dim), out.device)
    lines = part.shape[1]
    _combine[(lines,)](
        part, stats, out, rows, tokens, lines, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        BLOCK_D=launch.power_of_two(dim), SPLIT=split, SHARES=launch.power_of_two(split),
        **launch.options(choice, out.device),
    )  # fmt: skip


def _library(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q_heads, k_heads, v_heads = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q_heads, k_heads, v_heads, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def _main(dim: int) -> int:
    """The largest power of two of at least 16 that a head's width holds: the first tile of its columns."""
    return max(16, 1 << (dim.bit_length() - 1))


def _rest(dim: int) -> int:
    """Width of the second tile of columns, 1 where there is none."""
    left = dim - _main(dim)
    return 1 if left <= 0 else max(16, launch.power_of_two(left))
