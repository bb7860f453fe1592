"""Attention straight out of the fused projection: q and k are normed and rotated as their tiles are loaded.

A row is (query token, head within its group), as in `triton.py`. The halves of a head are tiles of their own, so that
a rotation moves nothing between threads: a score is the sum of two products. Every program rotates the keys it reads
anew, which pays where few programs share a K/V head and no later kernel reads the rotated keys.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.attention.softmax import LOG2_E, soften
from innerloop.kernels.device import dot, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Limits, Shape, Table


def _half(dim: int) -> int:
    """Width of the tile of one half."""
    return max(16, launch.power_of_two(dim // 2))


def _shared_bytes(choice: Launch, shape: Shape) -> int:
    """Query and rotated key tiles for the tensor cores, weights of a block; K, V and angles of each further stage."""
    dim, element = shape[2:]
    wide = 2 * _half(dim)
    q, k = (choice[size] * wide * element for size in ("BLOCK_M", "BLOCK_N"))
    weights = choice["BLOCK_M"] * choice["BLOCK_N"] * 4
    return q + 2 * k + weights + (choice.stages - 1) * (2 * k + choice["BLOCK_N"] * (wide * 4 + 4)) + 2048


def _suits(choice: Launch, shape: Shape, limits: Limits) -> bool:
    """Tiles of no more than twice the rows or keys; at most 128 registers a thread each for sums, scores and a rotation."""
    rows, keys, dim, _ = shape
    block_m, block_n, room = choice["BLOCK_M"], choice["BLOCK_N"], 32 * choice.warps * 128
    fits = block_m * (2 * _half(dim)) <= room and block_n * (4 * _half(dim)) <= room and block_m * block_n <= room
    return fits and block_m <= max(16, 2 * rows) and block_n <= max(16, 2 * keys)


def _tile(warps: int, stages: int, rows: int, keys: int) -> Launch:
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=keys)


_ANYWHERE = [_tile(4, 1, 32, 32), _tile(4, 1, 16, 32), _tile(4, 1, 16, 16)]

NARROW = Table(
    "attention.rotary_narrow",
    default=[
        _tile(4, 2, 64, 64),
        _tile(4, 1, 64, 64),
        _tile(8, 2, 64, 64),
        _tile(4, 2, 32, 64),
        _tile(4, 1, 32, 64),
        _tile(4, 2, 64, 128),
        _tile(4, 1, 64, 128),
        _tile(8, 1, 64, 128),
        _tile(8, 1, 32, 128),
        _tile(8, 1, 64, 256),
        _tile(8, 1, 32, 256),
        _tile(16, 1, 64, 256),
        _tile(4, 2, 32, 32),
        *_ANYWHERE,
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)
WIDE = Table(
    "attention.rotary",
    default=[
        _tile(8, 2, 64, 64),
        _tile(8, 1, 64, 64),
        _tile(4, 2, 64, 64),
        _tile(4, 1, 64, 64),
        _tile(16, 2, 64, 64),
        _tile(16, 1, 64, 64),
        _tile(8, 2, 64, 128),
        _tile(8, 1, 64, 128),
        _tile(16, 1, 64, 128),
        _tile(8, 2, 32, 64),
        _tile(4, 2, 64, 32),
        _tile(4, 2, 32, 64),
        _tile(8, 1, 32, 128),
        _tile(4, 2, 32, 32),
        *_ANYWHERE,
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _halves(ptr, lane, HALF: tl.constexpr):
    """Both halves of a head's norm weight in fp32, rows of one."""
    a = tl.load(ptr + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    b = tl.load(ptr + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    return a[None, :], b[None, :]


@triton.jit
def _turned(at, cos_at, sin_at, held, weight_a, weight_b, eps, NORMED: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the rows at `at`, normed and rotated in fp32, rounded as they would be stored."""
    kind = at.dtype.element_ty
    a = tl.load(at, mask=held, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=held, other=0.0).to(tl.float32)
    cos = tl.load(cos_at, mask=held, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=held, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a, b = a * inverse * weight_a, b * inverse * weight_b
    return (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)


@triton.jit
def _rotary_attention(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, valid_ptr, out_ptr, rows, tokens,
    qkv_batch, qkv_token, cos_batch, cos_token, valid_batch, scale, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    HEADS: tl.constexpr = KV_HEADS * GROUP
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    lane, column, key = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    real = row < rows
    kind = qkv_ptr.dtype.element_ty
    q_weight_a, q_weight_b, k_weight_a, k_weight_b = None, None, None, None
    if q_norm_ptr is not None:
        q_weight_a, q_weight_b = _halves(q_norm_ptr, lane, HALF)
    if k_norm_ptr is not None:
        k_weight_a, k_weight_b = _halves(k_norm_ptr, lane, HALF)
    wait_for_producer(PDL)
    qkv_at = qkv_ptr + batch * qkv_batch
    cos_at, sin_at = cos_ptr + batch * cos_batch + lane[None, :], sin_ptr + batch * cos_batch + lane[None, :]
    q_at = qkv_at + (token * qkv_token + head * DIM)[:, None] + lane[None, :]
    q_held, q_turn = real[:, None] & (lane < HALF)[None, :], (token * cos_token)[:, None]
    q_a, q_b = _turned(q_at, cos_at + q_turn, sin_at + q_turn, q_held, q_weight_a, q_weight_b, eps, q_norm_ptr is not None, HALF)  # fmt: skip
    k_at = qkv_at + (HEADS + kv_head) * DIM + lane[None, :]
    v_at = qkv_at + (HEADS + KV_HEADS + kv_head) * DIM + column[None, :]
    maximum = tl.full((BLOCK_M,), -1.0e30, tl.float32)  # finite, so that masked minus masked is not NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    end = tokens
    if CAUSAL:
        end = tl.minimum(tokens, (tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    for first in range(0, end, BLOCK_N):
        at = first + key
        there = at < tokens
        seen = there
        if valid_ptr is not None:
            seen = tl.load(valid_ptr + batch * valid_batch + at, mask=there, other=0) != 0
        k_held, k_turn = there[:, None] & (lane < HALF)[None, :], (at * cos_token)[:, None]
        k_rows, v_rows = k_at + (at * qkv_token)[:, None], v_at + (at * qkv_token)[:, None]
        k_a, k_b = _turned(k_rows, cos_at + k_turn, sin_at + k_turn, k_held, k_weight_a, k_weight_b, eps, k_norm_ptr is not None, HALF)  # fmt: skip
        # Scores of masked keys are replaced whatever they are; of V nothing may reach a sum, not even 0 * NaN.
        v = tl.load(v_rows, mask=seen[:, None] & (column < DIM)[None, :], other=0.0)
        score = dot(q_a, tl.trans(k_a), nothing)
        score = dot(q_b, tl.trans(k_b), score)
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= token[:, None])
        weight, shrink, maximum, total = soften(tl.where(visible, score, float("-inf")), maximum, total, scale)
        acc = dot(weight.to(kind), v, acc * shrink)
    release_successor(PDL)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out_ptr + ((batch * tokens + token) * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(out_at, acc.to(kind), mask=real[:, None] & (column < DIM)[None, :])


def rotary_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    key_valid: Tensor | None,
    scale: float,
    causal: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """See kernels.attention."""
    batch, tokens, width = qkv.shape
    dim, group = width // (heads + 2 * kv_heads), heads // kv_heads
    rows, half = tokens * group, _half(dim)
    out = torch.empty((batch, tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
    qkv, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (qkv, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    table = NARROW if half <= 32 else WIDE
    choice = launch.choose(table, (rows, tokens, dim, qkv.element_size()), qkv.device)
    _rotary_attention[(triton.cdiv(rows, choice["BLOCK_M"]), batch * kv_heads)](
        qkv, cos, sin, q_norm, k_norm, key_valid, out, rows, tokens, *qkv.stride()[:2], *cos.stride()[:2],
        0 if key_valid is None else key_valid.stride(0), scale * LOG2_E, eps,
        KV_HEADS=kv_heads, GROUP=group, HALF=dim // 2, BLOCK_H=half, BLOCK_D=2 * half, CAUSAL=causal,
        **launch.options(choice, qkv.device),
    )  # fmt: skip
    return out
