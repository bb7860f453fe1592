"""Flash attention for few K/V heads: the query heads of a K/V head are rows of one tile, keys may be split.

A row is (query token, head within its group). Blocks of keys are told apart on the device: those without a valid key
are never loaded; the first run of blocks whose keys every row sees needs no mask (and may come as bulk copies), as all
of them are in the masks of one camera or more and a padded prompt; the others are masked. With SPLIT > 1 each program
walks its share of both and a second kernel adds the shares in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from innerloop.kernels import launch
from innerloop.kernels.attention import ahead, whole
from innerloop.kernels.attention.rotary import rotary_attention as rotary_attention
from innerloop.kernels.attention.softmax import LOG2_E, soften
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table

FEW_ROWS = 1024  # up to here row tiles alone do not fill a device, and keys are split,
ENOUGH_HEADS, SHORT = 12, 256  # unless so many heads read so few keys: adding shares then costs more than it saves


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    """Pipelined K and V tiles, and Q where the tensor cores read it from shared memory."""
    if choice == LIBRARY:
        return 0
    dim, element = shape[2:4]
    tile = (_main(dim) + _rest(dim)) * element
    return choice["BLOCK_M"] * tile + 2 * choice["BLOCK_N"] * tile * choice.stages + 2048


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """No split into more shares than blocks; accumulators of at most 128 registers a thread.

    Bulk copies from compute capability 9.0 on, of heads of 128 or more that one tile of columns holds. SHORT_KEYS for one
    block of keys and as many rows.
    """
    rows, keys, dim, element, masked = shape
    if choice == LIBRARY:
        return not masked and element == 2 and dim % 8 == 0 and limits.capability >= 90
    if choice["BULK"] and (limits.capability < 90 or dim < 128 or _rest(dim) > 1):
        return False
    if choice == SHORT_KEYS and max(rows, keys) > 64:
        return False
    shares = choice["SPLIT"] <= triton.cdiv(keys, choice["BLOCK_N"])
    return shares and choice["BLOCK_M"] * dim <= 32 * choice.warps * 128 and choice["BLOCK_M"] <= max(16, 2 * rows)


def _tile(warps: int, stages: int, rows: int, keys: int, split: int = 1, bulk: int = 0) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=keys, SPLIT=split, BULK=bulk)


LIBRARY = Launch.of(0)  # cuDNN's attention through torch, where nothing is masked
SHORT_KEYS = _tile(4, 2, 32, 64)
_ANYWHERE = [_tile(4, 2, 16, 64), _tile(4, 1, 32, 32), _tile(4, 1, 16, 16)]

MANY = Table(
    "attention.many",
    default=[_tile(4, 3, 64, 64), _tile(4, 2, 64, 64), _tile(4, 2, 64, 128), LIBRARY, _tile(4, 2, 64, 32), *_ANYWHERE],
    rows={90: [SHORT_KEYS, _tile(4, 3, 64, 64, bulk=1)]},
    shared_bytes=_shared_bytes,
    suits=_suits,
)
WIDE = Table(
    "attention.wide",
    default=[_tile(4, 2, 64, 64), _tile(8, 2, 64, 64), _tile(4, 2, 64, 32), _tile(8, 1, 64, 32), *_ANYWHERE],
    rows={90: [_tile(4, 3, 64, 64, bulk=1), _tile(4, 3, 64, 32, bulk=1)]},
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
        _tile(2, 1, 16, 32, 16),
        _tile(4, 1, 16, 64, 8),
        _tile(4, 1, 16, 32, 8),
        _tile(4, 1, 16, 32, 4),
        _tile(4, 1, 16, 16, 2),
        _tile(4, 1, 16, 16),
        # of 33 to 64 tokens with 8 heads: tiles of rows times shares just below the multiprocessors
        _tile(4, 1, 32, 64, 10),
        _tile(8, 1, 32, 64, 10),
        _tile(4, 2, 32, 64, 5),
        _tile(4, 2, 16, 64, 5),
        _tile(8, 1, 64, 64, 10),
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)
COMBINE = Table(
    "attention.combine",
    default=[Launch.of(4, BLOCK_R=4), Launch.of(2, BLOCK_R=1), Launch.of(4, BLOCK_R=1)],
    suits=lambda choice, shape, limits: choice["BLOCK_R"] == (4 if shape[0] > FEW_ROWS else 1),
)


@triton.jit
def _rows(desc, at, first, stride, place, column, WIDTH: tl.constexpr, DIM: tl.constexpr, BULK: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Columns of BLOCK_N rows that all exist; `place`: batch entry and head."""
    if BULK:
        tile = desc.load([place[0], first, place[1], 0]).reshape(BLOCK_N, WIDTH)
    else:
        row = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        tile = tl.load(at + row[:, None] * stride + column[None, :], mask=(column < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _blocks(valid_at, last, reach, key, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First block and end of the first run of blocks that every row sees whole; a running count of the others that
    hold a valid key: the i-th of them is the number of blocks whose count is at most i.
    """
    block = tl.arange(0, BLOCKS)
    every = block[:, None] * BLOCK_N + key[None, :]
    valid = tl.sum((tl.load(valid_at + every, mask=every <= last, other=0) != 0).to(tl.int32), axis=1)
    whole = (valid == BLOCK_N) & (block * BLOCK_N + BLOCK_N - 1 <= reach)
    first = tl.min(tl.where(whole, block, BLOCKS), axis=0)
    end = tl.min(tl.where(whole | (block < first), BLOCKS, block), axis=0)
    mixed = (valid > 0) & ((block < first) | (block >= end))
    return first, end, tl.cumsum(mixed.to(tl.int32), axis=0)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, valid_ptr, out_ptr, stats_ptr, rows, tokens, keys,
    q_batch, q_token, k_batch, k_token, v_batch, v_token, valid_batch, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, BULK: tl.constexpr, MASKED_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    batch, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    place = (batch, kv_head)
    batch = batch.to(tl.int64)
    share = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    main, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    key = tl.arange(0, BLOCK_N)
    real = row < rows
    kind = v_ptr.dtype.element_ty
    valid_at = valid_ptr
    reach, last = keys - 1, keys - 1  # the last key that every row sees, and that any row sees
    if CAUSAL:
        reach = tl.program_id(0) * BLOCK_M // GROUP + keys - tokens
        last = tl.minimum(last, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + keys - tokens)
    if valid_ptr is not None:
        valid_at = valid_ptr + batch * valid_batch
        first, end, mixed = _blocks(valid_at, last, reach, key, BLOCKS, BLOCK_N)
        mixeds = tl.max(mixed, axis=0)
    else:
        first, end = 0, tl.maximum(tl.minimum(reach, last) + 1, 0) // BLOCK_N
        mixeds = tl.maximum(last + BLOCK_N, 0) // BLOCK_N - end
    release_successor(PDL)
    wait_for_producer(PDL)
    q_at = q_ptr + (batch * q_batch + token.to(tl.int64) * q_token + head * Q_HEAD)[:, None]
    q = tl.load(q_at + main[None, :], mask=real[:, None] & (main < DIM)[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, MAIN), tl.float32)
    if REST > 1:
        q_rest = tl.load(q_at + rest[None, :], mask=real[:, None] & (rest < DIM)[None, :], other=0.0)
        acc_rest = tl.zeros((BLOCK_M, REST), tl.float32)
    k_at = k_ptr + batch * k_batch + kv_head * K_HEAD
    v_at = v_ptr + batch * v_batch + kv_head * V_HEAD
    # Finite before the first key, so that masked minus masked is not NaN.
    maximum = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    per_share = (end - first + SPLIT - 1) // SPLIT
    for block in range(first + share * per_share, tl.minimum(end, first + (share + 1) * per_share)):
        at = block * BLOCK_N
        k = _rows(k_desc, k_at, at, k_token, place, main, MAIN, DIM, BULK, BLOCK_N)
        v = _rows(v_desc, v_at, at, v_token, place, main, MAIN, DIM, BULK, BLOCK_N)
        score = dot(q, tl.trans(k), nothing)
        if REST > 1:
            k_rest = _rows(None, k_at, at, k_token, place, rest, REST, DIM, False, BLOCK_N)
            score = dot(q_rest, tl.trans(k_rest), score)
        weight, shrink, maximum, total = soften(score, maximum, total, scale)
        acc = dot(weight.to(kind), v, acc * shrink)
        if REST > 1:
            v_rest = _rows(None, v_at, at, v_token, place, rest, REST, DIM, False, BLOCK_N)
            acc_rest = dot(weight.to(kind), v_rest, acc_rest * shrink)
    if RAGGED:
        # From the last share on, which has the fewest whole blocks.
        per_share = (mixeds + SPLIT - 1) // SPLIT
        begin = (SPLIT - 1 - share) * per_share
        for i in tl.range(begin, tl.minimum(mixeds, begin + per_share), num_stages=MASKED_STAGES):
            at = end + i
            if valid_ptr is not None:
                at = tl.sum((mixed <= i).to(tl.int32), axis=0)
            at = at * BLOCK_N + key
            seen = at < keys
            if valid_ptr is not None:
                seen = tl.load(valid_at + at, mask=seen, other=0) != 0
            k_rows = k_at + at.to(tl.int64)[:, None] * k_token
            v_rows = v_at + at.to(tl.int64)[:, None] * v_token
            k = tl.load(k_rows + main[None, :], mask=seen[:, None] & (main < DIM)[None, :], other=0.0)
            v = tl.load(v_rows + main[None, :], mask=seen[:, None] & (main < DIM)[None, :], other=0.0)
            score = dot(q, tl.trans(k), nothing)
            if REST > 1:
                k_rest = tl.load(k_rows + rest[None, :], mask=seen[:, None] & (rest < DIM)[None, :], other=0.0)
                score = dot(q_rest, tl.trans(k_rest), score)
            visible = seen[None, :]
            if CAUSAL:
                visible = visible & (at[None, :] <= token[:, None] + (keys - tokens))
            score = tl.where(visible, score, float("-inf"))
            weight, shrink, maximum, total = soften(score, maximum, total, scale)
            acc = dot(weight.to(kind), v, acc * shrink)
            if REST > 1:
                v_rest = tl.load(v_rows + rest[None, :], mask=seen[:, None] & (rest < DIM)[None, :], other=0.0)
                acc_rest = dot(weight.to(kind), v_rest, acc_rest * shrink)
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
    out_kind = out_ptr.dtype.element_ty
    tl.store(out_at + main[None, :], acc.to(out_kind), mask=real[:, None] & (main < DIM)[None, :])
    if REST > 1:
        tl.store(out_at + rest[None, :], acc_rest.to(out_kind), mask=real[:, None] & (rest < DIM)[None, :])


@triton.jit
def _combine(
    part_ptr, stats_ptr, out_ptr, rows, tokens, lines,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row, unit = line % rows, line // rows
    column = tl.arange(0, BLOCK_D)
    real, held = line < lines, (line < lines)[:, None] & (column < DIM)[None, :]
    release_successor(PDL)
    wait_for_producer(PDL)
    largest = tl.full((BLOCK_R,), -1.0e30, tl.float32)
    for share in tl.static_range(SPLIT):
        largest = tl.maximum(largest, tl.load(stats_ptr + (share * lines + line) * 2, mask=real, other=-1.0e30))
    value, total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for share in tl.static_range(SPLIT):
        at = share * lines + line
        weight = tl.exp2(tl.load(stats_ptr + at * 2, mask=real, other=-1.0e30) - largest)
        total += weight * tl.load(stats_ptr + at * 2 + 1, mask=real, other=0.0)
        value += weight[:, None] * tl.load(part_ptr + at[:, None] * DIM + column[None, :], mask=held, other=0.0)
    value = value / tl.where(total > 0.0, total, 1.0)[:, None]
    batch, kv_head = unit // KV_HEADS, unit % KV_HEADS
    place = (batch * tokens + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(out_ptr + place[:, None] * DIM + column[None, :], value.to(out_ptr.dtype.element_ty), mask=held)


def attention(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """See kernels.attention."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    at_once = whole.choose(q, k, v, causal=causal)
    if at_once != whole.APART:
        return whole.run(q, k, v, key_valid, scale, at_once, memory=False, causal=causal)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    rows = tokens * (heads // kv_heads)
    many = WIDE if dim > 128 else MANY
    short = keys <= (SHORT if batch * kv_heads >= ENOUGH_HEADS else 64)
    table = FEW if rows * batch * kv_heads <= FEW_ROWS and not short else many
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
    options = launch.options(choice, q.device)
    options["BULK"] = bulk = choice["BULK"] == 1 and _copies_in_bulk(k) and _copies_in_bulk(v)
    blocks = [_in_blocks(t, choice["BLOCK_N"]) if bulk else None for t in (k, v)]
    _attend[grid](
        q, k, v, *blocks, key_valid, part, stats, rows, tokens, keys,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], 0 if key_valid is None else key_valid.stride(0),
        scale * LOG2_E, Q_HEAD=q.stride(2), K_HEAD=k.stride(2), V_HEAD=v.stride(2),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, MAIN=_main(dim), REST=_rest(dim),
        CAUSAL=causal, RAGGED=masked or keys % choice["BLOCK_N"] != 0, MASKED_STAGES=min(2, choice.stages),
        BLOCKS=launch.power_of_two(triton.cdiv(keys, choice["BLOCK_N"])), **options,
    )  # fmt: skip
    if split > 1:
        _add_shares(part, stats, out, (rows, tokens, split), (kv_heads, heads // kv_heads, dim))
    return out


def continued(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """See kernels.attention."""
    choice = ahead.choose(q, k, v)
    if choice == ahead.APART:
        return attention(q, k, v, key_valid, scale)
    batch, tokens, heads, dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    q = q if q.stride(-1) == 1 else q.contiguous()
    blocks, rows = triton.cdiv(k.shape[1], choice["BLOCK_N"]), tokens * group
    part, stats = (
        torch.empty((blocks, batch * kv_heads * rows, width), dtype=torch.float32, device=q.device)
        for width in (dim, 2)
    )
    ahead.run(q, k, v, key_valid, (part, stats), (scale * LOG2_E, start), choice)
    out = torch.empty((batch, tokens, heads * dim), dtype=q.dtype, device=q.device)
    _add_shares(part, stats, out, (rows, tokens, blocks), (kv_heads, group, dim))
    return out


def remembered(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float) -> Tensor:
    """See kernels.attention."""
    choice = whole.choose(q, k, v, memory=True)
    if choice == whole.APART:
        return attention(q, k, v, key_valid, scale)
    return whole.run(q, k, v, key_valid, scale, choice, memory=True, causal=False)


def _copies_in_bulk(t: Tensor) -> bool:
    """Bulk copies read whole heads, from multiples of 16 bytes."""
    strides = (s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1)
    aligned = t.data_ptr() % 16 == 0 and all(s > 0 and s * t.element_size() % 16 == 0 for s in strides)
    return aligned and _rest(t.shape[3]) == 1 and t.shape[3] >= 16


def _in_blocks(t: Tensor, block: int) -> Any:
    """A descriptor of [B, S, H, D] that copies `block` rows of one head."""
    # The stride of a dimension of one entry means nothing, and must be aligned nevertheless.
    strides = [s if n > 1 else 8 * t.shape[3] for s, n in zip(t.stride()[:3], t.shape, strict=False)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, block, 1, t.shape[3]])


def _add_shares(
    part: Tensor, stats: Tensor | None, out: Tensor, sizes: tuple[int, int, int], heads: tuple[int, int, int]
) -> None:
    rows, tokens, split = sizes
    kv_heads, group, dim = heads
    lines = part.shape[1]
    choice = launch.choose(COMBINE, (lines, dim), out.device)
    _combine[(triton.cdiv(lines, choice["BLOCK_R"]),)](
        part, stats, out, rows, tokens, lines, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
        BLOCK_D=launch.power_of_two(dim), SPLIT=split, **launch.options(choice, out.device),
    )  # fmt: skip


def _library(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q_heads, k_heads, v_heads = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q_heads, k_heads, v_heads, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def _main(dim: int) -> int:
    """Width of the first tile of a head's columns."""
    return launch.two_tiles(dim)[0]


def _rest(dim: int) -> int:
    """Width of the second tile of columns, 1 where there is none."""
    return launch.two_tiles(dim)[1] or 1
