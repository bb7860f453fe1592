"""Full attention straight out of a fused projection: q and k are rotated as their tiles are loaded.

The halves of a head are tiles of their own, so that a rotation moves nothing between threads: a score is the sum of two
products. Every tile of queries rotates all keys anew, which pays where there are few of them and no later kernel reads
the rotated keys.
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
    """Tiles of no more than twice the tokens; at most 128 registers a thread each for sums, scores and a rotation.

    Tiles of 64 rows only where they nearly fill the device. fp32 products are multiply-adds of whole tiles in
    registers: eight scores a thread, nothing pipelined.
    """
    tokens, units, dim, element = shape
    block_m, block_n, threads = choice["BLOCK_M"], choice["BLOCK_N"], 32 * choice.warps
    if element == 4 and (choice.stages > 1 or choice["AHEAD"] or block_m * block_n > 8 * threads):
        return False
    if block_m == 64 and not limits.nearly_full(units * triton.cdiv(tokens, block_m)):
        return False
    fits = max(block_m * 2 * _half(dim), block_n * 4 * _half(dim), block_m * block_n) <= 128 * threads
    return fits and max(block_m, block_n) <= max(16, 2 * tokens)


def _tile(warps: int, stages: int, rows: int, keys: int, ahead: int = 0) -> Launch:
    """ahead: the next tile of keys is on its way to registers while one is read.

    The compiler's own stages copy it to shared memory at the end of a turn, and read the angles from there once more.
    """
    return Launch.of(warps, stages, BLOCK_M=rows, BLOCK_N=keys, AHEAD=ahead)


TABLE = Table(
    "attention.rotary",
    default=[
        _tile(4, 1, 64, 64, ahead=1),
        _tile(8, 1, 64, 64, ahead=1),
        _tile(4, 1, 32, 64, ahead=1),
        _tile(8, 1, 32, 128, ahead=1),
        _tile(4, 2, 64, 64),
        _tile(4, 2, 32, 64),
        _tile(8, 1, 32, 256),
        _tile(4, 1, 32, 32),
        _tile(4, 1, 16, 16),
    ],
    shared_bytes=_shared_bytes,
    suits=_suits,
)


@triton.jit
def _raw(at, cos_at, sin_at, held, HALF: tl.constexpr):
    """Both halves of the rows at `at`, and their angles."""
    a, b = tl.load(at, mask=held, other=0.0), tl.load(at + HALF, mask=held, other=0.0)
    return a, b, tl.load(cos_at, mask=held, other=0.0), tl.load(sin_at, mask=held, other=0.0)


@triton.jit
def _turned(a, b, cos, sin):
    """Both halves rotated in fp32, rounded as they would be stored."""
    kind = a.dtype
    a, b, cos, sin = a.to(tl.float32), b.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    return (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)


@triton.jit
def _rotary_attention(
    qkv_ptr, cos_ptr, sin_ptr, valid_ptr, out_ptr, tokens,
    qkv_batch, qkv_token, cos_batch, cos_token, valid_batch, scale,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane, column, key = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    real, turns, wide = (token < tokens)[:, None], (lane < HALF)[None, :], (column < DIM)[None, :]
    release_successor(PDL)
    wait_for_producer(PDL)
    q_at = qkv_ptr + batch * qkv_batch + head * DIM + lane[None, :]
    k_at = q_at + HEADS * DIM
    v_at = qkv_ptr + batch * qkv_batch + (2 * HEADS + head) * DIM + column[None, :]
    cos_at, sin_at = cos_ptr + batch * cos_batch + lane[None, :], sin_ptr + batch * cos_batch + lane[None, :]
    valid_at = valid_ptr
    if valid_ptr is not None:
        valid_at = valid_ptr + batch * valid_batch
    line, angle = (token * qkv_token)[:, None], (token * cos_token)[:, None]
    q_a, q_b, q_cos, q_sin = _raw(q_at + line, cos_at + angle, sin_at + angle, real & turns, HALF)
    if AHEAD:  # the first tiles are on their way while the queries are rotated, then each while the one before is read
        line, angle = (key * qkv_token)[:, None], (key * cos_token)[:, None]
        a, b, cos, sin = _raw(k_at + line, cos_at + angle, sin_at + angle, (key < tokens)[:, None] & turns, HALF)
        seen, next_seen = counted(valid_at, key, tokens), counted(valid_at, key + BLOCK_N, tokens)
        v = tl.load(v_at + line, mask=seen[:, None] & wide, other=0.0)
    q_a, q_b = _turned(q_a, q_b, q_cos, q_sin)
    maximum = tl.full((BLOCK_M,), -1.0e30, tl.float32)  # finite, so that masked minus masked is not NaN
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, tokens, BLOCK_N):
        if AHEAD:
            k_a, k_b = _turned(a, b, cos, sin)
            visible, values, at = seen, v, first + BLOCK_N + key
            line, angle = (at * qkv_token)[:, None], (at * cos_token)[:, None]
            a, b, cos, sin = _raw(k_at + line, cos_at + angle, sin_at + angle, (at < tokens)[:, None] & turns, HALF)
            seen, next_seen = next_seen, counted(valid_at, at + BLOCK_N, tokens)
            v = tl.load(v_at + line, mask=seen[:, None] & wide, other=0.0)
        else:
            here = first + key
            visible = counted(valid_at, here, tokens)
            rows_at, turn = (here * qkv_token)[:, None], (here * cos_token)[:, None]
            k_a, k_b, k_cos, k_sin = _raw(k_at + rows_at, cos_at + turn, sin_at + turn, (here < tokens)[:, None] & turns, HALF)  # fmt: skip
            k_a, k_b = _turned(k_a, k_b, k_cos, k_sin)
            # Scores of masked keys are replaced whatever they are; of V nothing may reach a sum, not even 0 * NaN.
            values = tl.load(v_at + rows_at, mask=visible[:, None] & wide, other=0.0)
        score = dot(q_a, tl.trans(k_a), nothing)
        score = tl.where(visible[None, :], dot(q_b, tl.trans(k_b), score), float("-inf"))
        weight, shrink, maximum, total = soften(score, maximum, total, scale)
        acc = dot(weight.to(values.dtype), values, acc * shrink)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out_ptr + ((batch * tokens + token) * HEADS + head)[:, None] * DIM + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real & wide)


def rotary_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_valid: Tensor | None, scale: float
) -> Tensor:
    """See kernels.attention."""
    batch, tokens, width = qkv.shape
    dim = width // (3 * heads)
    out = torch.empty((batch, tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
    qkv, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (qkv, cos, sin))
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    choice = launch.choose(TABLE, (tokens, batch * heads, dim, qkv.element_size()), qkv.device)
    _rotary_attention[(triton.cdiv(tokens, choice["BLOCK_M"]), batch * heads)](
        qkv, cos, sin, key_valid, out, tokens, *qkv.stride()[:2], *cos.stride()[:2],
        0 if key_valid is None else key_valid.stride(0), scale * LOG2_E,
        HEADS=heads, HALF=dim // 2, BLOCK_H=_half(dim), BLOCK_D=2 * _half(dim), **launch.options(choice, qkv.device),
    )  # fmt: skip
    return out
