"""The same functions made of other ops, for dense weights: GPUs without bulk copies, more rows than the kernels take."""

import torch
from torch import Tensor

from innerloop.kernels.activation import glu
from innerloop.kernels.attention import attention
from innerloop.kernels.euler import Guide, project_and_step
from innerloop.kernels.euler import guide as pull
from innerloop.kernels.euler import project_in as enter
from innerloop.kernels.linear import linear
from innerloop.kernels.norm import gated_add, layer_norm, modulated_rms_norm
from innerloop.kernels.rope import rotate_and_store
from innerloop.kernels.skinny.packing import Packed
from innerloop.kernels.skinny.reference import dense


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
    """As reference.norm_qkv_rope."""
    qkv = linear(modulated_rms_norm(x, scale, shift, eps, prefix), dense(weight))
    return rotate_and_store(qkv, cos, sin, heads, kv_heads, k_cache, v_cache, start)


def attend(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """As reference.attend."""
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
    """As reference.norm_linear."""
    return linear(layer_norm(x, scale, shift, eps), dense(weight), bias, activation="gelu_tanh" if gelu else None)


def project_residual(
    y: Tensor,
    weight: Tensor | Packed,
    gate: Tensor | None,
    residual: Tensor,
    bias: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """As reference.project_residual."""
    delta = linear(y, dense(weight), bias)
    if gate is None:
        return residual + delta
    return gated_add(residual, delta, gate, prefix)


def norm_glu(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    prefix: Tensor | None = None,
) -> Tensor:
    """As reference.norm_glu."""
    return glu(linear(modulated_rms_norm(x, scale, shift, eps, prefix), dense(weight)), "gelu_tanh")


def project_in(state: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, silu: bool = False) -> Tensor:
    """As reference.project_in."""
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
    """As reference.norm_project_step."""
    moved = project_and_step(modulated_rms_norm(x.float(), scale, shift, eps), weight, bias, state, dt)
    return moved if guide is None else pull(state, moved, *guide, dt)
