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
    turned = held & (head < HEADS + KV_HEADS)[:, None]
    angle = (batch * cos_batch + position * cos_token)[:, None] + lane[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    q_a, q_b = _head_weight(q_norm_ptr, lane, HALF)
    k_a, k_b = _head_weight(k_norm_ptr, lane, HALF)
    wait_for_producer(PDL)
    release_successor(PDL)  # behind the wait: attention may read ahead what was written before
    at = qkv_ptr + token.to(tl.int64)[:, None] * qkv_stride + head[:, None] * (2 * HALF) + lane[None, :]
    raw_a = tl.load(at, mask=held, other=0.0)
    raw_b = tl.load(at + HALF, mask=held, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if q_norm_ptr is not None or k_norm_ptr is not None:
        inverse = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        of_q, of_k = is_q[:, None], (~is_q)[:, None]
        if q_norm_ptr is not None:
            a, b = tl.where(of_q, a * inverse * q_a, a), tl.where(of_q, b * inverse * q_b, b)
        if k_norm_ptr is not None:
            a, b = tl.where(of_k, a * inverse * k_a, a), tl.where(of_k, b * inverse * k_b, b)
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
def _head_weight(weight_ptr, lane, HALF: tl.constexpr):
    """Both halves of a head norm's weight [1, HALF], fp32; zeros where there is none."""
    first = tl.zeros_like(lane).to(tl.float32)
    second = first
    if weight_ptr is not None:
        first = tl.load(weight_ptr + lane, mask=lane < HALF, other=0.0).to(tl.float32)
        second = tl.load(weight_ptr + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


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
