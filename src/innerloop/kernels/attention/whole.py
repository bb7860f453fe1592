"""Attention whose programs hold all keys at once: no loop, no running softmax over more than two blocks, few waits.

A program has one tile of rows (query token, head within its group) and all keys, in two blocks whose widths are powers of
two. The mask is loaded while the predecessor still works; keys and values too where they are a memory, written before the
chain of dependent launches began: all that ran before it has ended when any kernel in it starts. Otherwise queries, keys
and values are on their way together, where a loop over blocks waits for a mask, then for its keys, in every turn.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.attention.softmax import LOG2_E, counted, soften
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table

APART = Launch.of(0)  # the op's other forms
LEAST = 16  # of a tensor core's tile


def _width(dim: int) -> int:
    return max(LEAST, launch.power_of_two(dim))


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    """Queries, weights, keys and values as the tensor cores read them."""
    if choice == APART:
        return 0
    _, _, keys, dim, element = shape[:5]
    wide, all_keys = _width(dim), sum(launch.two_tiles(keys))
    return ((choice["BLOCK_M"] + 2 * all_keys) * wide + choice["BLOCK_M"] * all_keys) * element + 2048


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """16-bit heads; keys and values in 96 registers a thread, scores in 64; all programs at once, no tile half empty.

    Keys that the predecessor writes under a causal mask, by small tiles, alone: elsewhere blocks are level or faster.
    """
    rows, units, keys, dim, element, memory, causal = shape
    if choice == APART:
        return True
    if not memory and (not causal or choice["BLOCK_M"] > 32):
        return False
    all_keys, threads = sum(launch.two_tiles(keys)), 32 * choice.warps
    held = all_keys * _width(dim) <= 96 * threads and choice["BLOCK_M"] * max(all_keys, _width(dim)) <= 64 * threads
    programs = triton.cdiv(rows, choice["BLOCK_M"]) * units
    return element == 2 and held and programs <= limits.multiprocessors and choice["BLOCK_M"] <= max(LEAST, 2 * rows)


def _tile(warps: int, rows: int) -> Launch:
    return Launch.of(warps, 1, BLOCK_M=rows)


TABLE = Table(
    "attention.whole",
    default=[APART],
    rows={
        90: [
            *(_tile(*sizes) for sizes in ((4, 32), (8, 16), (4, 16), (8, 32), (8, 64), (16, 32), (16, 64))),
            APART,
        ]
    },
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _rows(at, key, stride, column, wanted, DIM: tl.constexpr):
    """Rows of a head that count, zeros elsewhere: what lies there must not reach a sum."""
    return tl.load(at + key.to(tl.int64)[:, None] * stride + column[None, :], mask=wanted[:, None] & (column < DIM)[None, :], other=0.0)  # fmt: skip


@triton.jit
def _add(q, k, v, visible, acc, maximum, total, scale, BLOCK_M: tl.constexpr, KEYS: tl.constexpr):
    """Running results with one more block of keys."""
    score = dot(q, tl.trans(k), tl.zeros((BLOCK_M, KEYS), tl.float32))
    score = tl.where(visible, score, float("-inf"))
    weight, shrink, maximum, total = soften(score, maximum, total, scale)
    return dot(weight.to(v.dtype), v, acc * shrink), maximum, total


@triton.jit
def _whole(
    q_ptr, k_ptr, v_ptr, valid_ptr, out_ptr, rows, tokens, keys,
    q_batch, q_token, k_batch, k_token, v_batch, v_token, valid_batch, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    CAUSAL: tl.constexpr, MEMORY: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    row, column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    near, far = tl.arange(0, FIRST), FIRST + tl.arange(0, max(SECOND, 1))
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = (row < rows)[:, None] & (column < DIM)[None, :]
    reach = token + (keys - tokens)  # the last key that a row sees, where it is not all of them
    end = keys
    if CAUSAL:
        end = tl.minimum(end, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + keys - tokens + 1)
    valid_at = valid_ptr
    if valid_ptr is not None:
        valid_at = valid_ptr + batch * valid_batch
    k_at, v_at = k_ptr + batch * k_batch + kv_head * K_HEAD, v_ptr + batch * v_batch + kv_head * V_HEAD
    seen, far_seen = counted(valid_at, near, end), counted(valid_at, far, end)
    if MEMORY:
        k, v = _rows(k_at, near, k_token, column, seen, DIM), _rows(v_at, near, v_token, column, seen, DIM)
        if SECOND > 0:
            far_k = _rows(k_at, far, k_token, column, far_seen, DIM)
            far_v = _rows(v_at, far, v_token, column, far_seen, DIM)
    release_successor(PDL)
    wait_for_producer(PDL)
    q_at = q_ptr + (batch * q_batch + token.to(tl.int64) * q_token + head * Q_HEAD)[:, None] + column[None, :]
    q = tl.load(q_at, mask=real, other=0.0)
    if not MEMORY:
        k, v = _rows(k_at, near, k_token, column, seen, DIM), _rows(v_at, near, v_token, column, seen, DIM)
        if SECOND > 0:
            far_k = _rows(k_at, far, k_token, column, far_seen, DIM)
            far_v = _rows(v_at, far, v_token, column, far_seen, DIM)
    visible, far_visible = seen[None, :], far_seen[None, :]
    if CAUSAL:
        visible = visible & (near[None, :] <= reach[:, None])
        far_visible = far_visible & (far[None, :] <= reach[:, None])
    # Finite before the first key, so that masked minus masked is not NaN.
    maximum, total = tl.full((BLOCK_M,), -1.0e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc, maximum, total = _add(q, k, v, visible, acc, maximum, total, scale, BLOCK_M, FIRST)
    if SECOND > 0:
        acc, maximum, total = _add(q, far_k, far_v, far_visible, acc, maximum, total, scale, BLOCK_M, SECOND)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    line = (batch * tokens + token) * (KV_HEADS * GROUP) + head
    tl.store(out_ptr + line[:, None] * DIM + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=real)


def choose(q: Tensor, k: Tensor, v: Tensor, memory: bool = False, causal: bool = False) -> Launch:
    """Tiles for q [B, T, Hq, D] over k and v [B, S, Hkv, D], or APART: outside a chain, and where nothing suits.

    Of heads that are no whole rows too: their copy would be made inside the chain.
    """
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    rows = q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.dtype is k.dtype
    if not launch.dependent() or q.numel() == 0 or keys == 0 or not rows:
        return APART
    shape = (tokens * (heads // kv_heads), batch * kv_heads, keys, dim, q.element_size(), int(memory), int(causal))
    return launch.choose(TABLE, shape, q.device)


def run(
    q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, choice: Launch, memory: bool, causal: bool
) -> Tensor:
    """As kernels.attention.attention, or `remembered` where keys and values are a memory, by a choice that is not APART."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    rows, (first, second) = tokens * (heads // kv_heads), launch.two_tiles(keys)
    out = torch.empty((batch, tokens, heads * dim), dtype=q.dtype, device=q.device)
    _whole[(triton.cdiv(rows, choice["BLOCK_M"]), batch * kv_heads)](
        q, k, v, key_valid, out, rows, tokens, keys, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        0 if key_valid is None else key_valid.stride(0), scale * LOG2_E, Q_HEAD=q.stride(2), K_HEAD=k.stride(2),
        V_HEAD=v.stride(2), KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_D=_width(dim), FIRST=first,
        SECOND=second, MEMORY=memory, CAUSAL=causal, **launch.options(choice, q.device),
    )  # fmt: skip
    return out
