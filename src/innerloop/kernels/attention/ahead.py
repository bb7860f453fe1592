"""Attention of few new tokens over a long cache in a chain of dependent launches: what was there before is read ahead.

A program has one tile of rows (query token, head within its group) and one block of keys. Cache rows below `start` and
the mask are loaded while the predecessor still works; behind the wait stand the queries, their scores and one sum. A
second kernel adds the blocks in a fixed order, as for the split form of the op.

At that time the predecessor may still write, but what ran before it has ended: it is a kernel that rotates and stores, and
its programs wait before they let this one start. (Other kernels let their successor start at once. Few-row CUDA kernels
too, but the first of their chain starts as any kernel does, after the end of all others.)
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.attention.softmax import soften
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table

APART = Launch.of(0)  # the op's other forms


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    return 0 if choice == APART else (choice["BLOCK_M"] + 2 * choice["BLOCK_N"]) * shape[3] * 2 + 2048


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """16-bit heads that one tile holds, and programs for two a multiprocessor at most."""
    rows, units, keys, dim, element = shape
    if choice == APART:
        return True
    programs = triton.cdiv(rows, choice["BLOCK_M"]) * units * triton.cdiv(keys, choice["BLOCK_N"])
    whole = element == 2 and dim >= 16 and dim & (dim - 1) == 0 and dim * choice["BLOCK_M"] <= 64 * 32 * choice.warps
    return whole and programs <= 2 * limits.multiprocessors


def _tile(warps: int, rows: int, keys: int, **limit: int) -> Launch:
    return Launch.of(warps, 1, BLOCK_M=rows, BLOCK_N=keys, **limit)


# Without a limit the compiler takes up to 136 registers of it, and one program fills a multiprocessor.
PAIRED = _tile(8, 32, 64, maxnreg=128)

TABLE = Table(
    "attention.ahead",
    default=[APART],
    rows={
        90: [
            PAIRED,
            *(_tile(*sizes) for sizes in ((8, 64, 64), (4, 16, 64), (8, 32, 128), (4, 32, 32), (8, 32, 64))),
            APART,
        ]
    },
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _ahead(
    q_ptr, k_ptr, v_ptr, valid_ptr, out_ptr, stats_ptr, rows, keys, start,
    q_batch, q_token, k_batch, k_token, v_batch, v_token, valid_batch, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    unit, block = tl.program_id(1), tl.program_id(2)
    batch, kv_head = (unit // KV_HEADS).to(tl.int64), unit % KV_HEADS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at, column = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, DIM)
    seen = at < keys
    if valid_ptr is not None:
        seen = tl.load(valid_ptr + batch * valid_batch + at, mask=seen, other=0) != 0
    k_at = k_ptr + batch * k_batch + kv_head * K_HEAD + at.to(tl.int64)[:, None] * k_token + column[None, :]
    v_at = v_ptr + batch * v_batch + kv_head * V_HEAD + at.to(tl.int64)[:, None] * v_token + column[None, :]
    old = seen & (at < start)
    k = tl.load(k_at, mask=old[:, None], other=0.0)
    v = tl.load(v_at, mask=old[:, None], other=0.0)
    release_successor(PDL)
    wait_for_producer(PDL)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = row < rows
    q_at = q_ptr + (batch * q_batch + token.to(tl.int64) * q_token + head * Q_HEAD)[:, None] + column[None, :]
    q = tl.load(q_at, mask=real[:, None], other=0.0)
    new = seen & (at >= start)
    k = tl.load(k_at, mask=new[:, None], other=k)
    v = tl.load(v_at, mask=new[:, None], other=v)
    score = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    score = tl.where(seen[None, :], score, float("-inf"))
    # Finite, so that masked minus masked is not NaN.
    maximum, total = tl.full((BLOCK_M,), -1.0e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    weight, _, maximum, total = soften(score, maximum, total, scale)
    acc = dot(weight.to(v_ptr.dtype.element_ty), v, tl.zeros((BLOCK_M, DIM), tl.float32))
    line = (block * tl.num_programs(1) + unit).to(tl.int64) * rows + row
    tl.store(stats_ptr + line * 2, maximum, mask=real)
    tl.store(stats_ptr + line * 2 + 1, total, mask=real)
    tl.store(out_ptr + line[:, None] * DIM + column[None, :], acc, mask=real[:, None])


def choose(q: Tensor, k: Tensor, v: Tensor) -> Launch:
    """Tiles for q [B, T, Hq, D] over k and v [B, S, Hkv, D], or APART: outside a chain, and where nothing suits.

    Of heads that are no whole rows too: their copy would be the predecessor, and still be written when it is read.
    """
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    whole = k.stride(-1) == v.stride(-1) == 1 and q.dtype is k.dtype
    if not launch.dependent() or q.numel() == 0 or not whole:
        return APART
    shape = (tokens * (heads // kv_heads), batch * kv_heads, keys, dim, q.element_size())
    return launch.choose(TABLE, shape, q.device)


def run(
    q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, out: tuple[Tensor, Tensor], sizes: tuple[float, int], choice: Launch
) -> None:  # fmt: skip
    """Writes out (float32 [blocks, B Hkv rows, D], [blocks, B Hkv rows, 2]); sizes: scale times log2(e), start."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    rows = tokens * (heads // kv_heads)
    grid = (triton.cdiv(rows, choice["BLOCK_M"]), batch * kv_heads, out[0].shape[0])
    scale, start = sizes
    _ahead[grid](
        q, k, v, key_valid, *out, rows, keys, start, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        0 if key_valid is None else key_valid.stride(0), scale, Q_HEAD=q.stride(2), K_HEAD=k.stride(2),
        V_HEAD=v.stride(2), KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, **launch.options(choice, q.device),
    )  # fmt: skip
