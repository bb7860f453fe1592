"""Few-row linears in plain torch: fp32 inside the norm, rotation and gate; products in the weights' dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.attention.reference import attention
from innerloop.kernels.euler.reference import Guide
from innerloop.kernels.euler.reference import guide as pull
from innerloop.kernels.euler.reference import project_in as enter
from innerloop.kernels.norm.reference import by_token, layer_norm, modulated_rms_norm
from innerloop.kernels.rope.reference import rotate_and_store
from innerloop.kernels.skinny.packing import Packed, unpack


def dense(weight: Tensor | Packed) -> Tensor:
    """The [N, K] weight itself."""
    if not isinstance(weight, Packed):
        return weight
    return unpack(weight) if weight.kept is None else weight.kept


def norm_qkv_rope(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    prefix: Tensor | None = None,
) -> Tensor:
    """Rotated q [B, T, heads, D] of the normed x; its K/V go to rows start .. start + T of the caches."""
    qkv = F.linear(modulated_rms_norm(x, scale, shift, eps, prefix), dense(weight))
    return rotate_and_store(qkv, cos, sin, heads, kv_heads, k_cache, v_cache, start)


def attend(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """attention(q, k, v, key_valid, scale); `start` only tells which rows are new."""
    return attention(q, k, v, key_valid, scale)


def norm_linear(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    bias: Tensor,
    gelu: bool,
) -> Tensor:
    """(layer_norm(x) * scale + shift) W^T + b, and gelu_tanh of it where asked."""
    out = F.linear(layer_norm(x, scale, shift, eps), dense(weight), bias)
    return F.gelu(out.float(), approximate="tanh").to(out.dtype) if gelu else out


def norm_attend(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    bias: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    heads: int,
) -> Tensor:
    """attention of norm_linear's rows, `heads` queries each, scores over the square root of a head's width."""
    q = norm_linear(x, scale, shift, eps, weight, bias, False).view(*x.shape[:2], heads, -1)
    return attention(q, k, v, key_valid, q.shape[-1] ** -0.5)


def project_residual(
    y: Tensor,
    weight: Tensor | Packed,
    gate: Tensor | None,
    residual: Tensor,
    bias: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """residual + gate * (y W^T + b), the sum in fp32."""
    delta = F.linear(y, dense(weight), bias).float()
    if gate is not None:
        delta = delta * (gate if prefix is None else by_token(gate, prefix, y.shape[1])).float()
    return (residual.float() + delta).to(residual.dtype)


def norm_glu(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    prefix: Tensor | None = None,
) -> Tensor:
    """gelu_tanh(gate) * up of the normed x; the gate rows are the weight's first half."""
    normed = modulated_rms_norm(x, scale, shift, eps, prefix)
    gate, up = F.linear(normed, dense(weight)).float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def project_in(state: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, silu: bool = False) -> Tensor:
    """state W^T + b in fp32, or the SiLU of that, rounded to dtype."""
    return enter(state, weight, bias, dtype, "silu" if silu else None)


def norm_project_step(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    dt: float,
    guide: Guide | None = None,
) -> Tensor:
    """state + dt * (normed x W^T + b), guided where there is one, all in fp32."""
    hidden = modulated_rms_norm(x.float(), scale, shift, eps)
    moved = state + dt * F.linear(hidden, weight.float(), bias.float())
    return moved if guide is None else pull(state, moved, *guide, dt)
