"""q/k norm, rotation and K/V write in one pass over the fused projection: a tile is a few (token, head) rows."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Table

TABLE = Table(
    "rope",
    default=[
        Launch.of(4, BLOCK_R=8),
        Launch.of(4, BLOCK_R=4),
        Launch.of(2, BLOCK_R=4),
        Launch.of(8, BLOCK_R=16),
        Launch.of(1, BLOCK_R=1),
    ],
)


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr,
    rows, tokens, start, qkv_stride, cos_batch, cos_token, k_batch, k_token, k_head, v_batch, v_token, v_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_H)
    token, head = row // ALL, row % ALL
    batch, position = token // tokens, token % tokens
    held = (row < rows)[:, None] & (lane < HALF)[None, :]
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    wait_for_producer(PDL)
    release_successor(PDL)  # behind the wait: attention may read ahead what was written before
    at = qkv_ptr + token.to(tl.int64)[:, None] * qkv_stride + head[:, None] * (2 * HALF) + lane[None, :]
    raw_a = tl.load(at, mask=held, other=0.0)
    raw_b = tl.load(at + HALF, mask=held, other=0.0)
    turned = held & (head < HEADS + KV_HEADS)[:, None]
    angle = (batch * cos_batch + position * cos_token)[:, None] + lane[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if q_norm_ptr is not None:
        a_q, b_q = _head_norm(a, b, q_norm_ptr, lane, eps, HALF)
        a, b = tl.where(is_q[:, None], a_q, a), tl.where(is_q[:, None], b_q, b)
    if k_norm_ptr is not None:
        a_k, b_k = _head_norm(a, b, k_norm_ptr, lane, eps, HALF)
        a, b = tl.where(is_q[:, None], a, a_k), tl.where(is_q[:, None], b, b_k)
    left, right = a * cos - b * sin, b * cos + a * sin
    if HEADS > 0:
        q_at = q_ptr + token.to(tl.int64)[:, None] * (HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + lane[None, :]
        _store_halves(q_at, left, right, held & is_q[:, None], HALF)
    cache_row, kv_head = (start + position).to(tl.int64), head - HEADS
    k_at = k_ptr + (batch.to(tl.int64) * k_batch + cache_row * k_token + kv_head * k_head)[:, None] + lane[None, :]
    _store_halves(k_at, left, right, turned & (head >= HEADS)[:, None], HALF)
    kv_head = kv_head - KV_HEADS
    v_at = v_ptr + (batch.to(tl.int64) * v_batch + cache_row * v_token + kv_head * v_head)[:, None] + lane[None, :]
    _store_halves(v_at, raw_a, raw_b, held & is_v[:, None], HALF)


@triton.jit
def _head_norm(a, b, weight_ptr, lane, eps, HALF: tl.constexpr):
    square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
    inverse = tl.rsqrt(square + eps)[:, None]
    weight_a = tl.load(weight_ptr + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptr + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    return a * inverse * weight_a[None, :], b * inverse * weight_b[None, :]


@triton.jit
def _store_halves(at, left, right, mask, HALF: tl.constexpr):
    tl.store(at, left.to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, right.to(at.dtype.element_ty), mask=mask)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """See kernels.rope."""
    batch, tokens, _ = qkv.shape
    dim = k_cache.shape[-1]
    q = torch.empty((batch, tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    rows = batch * tokens * (heads + 2 * kv_heads)
    if rows == 0:
        return q
    qkv, cos, sin = qkv.contiguous(), _inner_contiguous(cos), _inner_contiguous(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    choice = launch.choose(TABLE, (heads + 2 * kv_heads, dim), qkv.device)
    _rotate_and_store[(triton.cdiv(rows, choice["BLOCK_R"]),)](
        qkv, cos, sin, q_norm, k_norm, q, k_cache, v_cache,
        rows, tokens, start, qkv.stride(1), cos.stride(0), cos.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        eps, HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_H=launch.power_of_two(dim // 2),
        **launch.options(choice, qkv.device),
    )  # fmt: skip
    return q


def _inner_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()
