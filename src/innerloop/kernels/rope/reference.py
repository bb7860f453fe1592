"""Rotary embedding of q and k, half-split pairs (i, i + D/2), in fp32, and the K/V write."""

import torch
from torch import Tensor


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
    """Rotated q; writes rotated k and plain v to rows start .. start + T of the caches."""
    batch, tokens, _ = qkv.shape
    dim = k_cache.shape[-1]
    q, k, v = qkv.view(batch, tokens, heads + 2 * kv_heads, dim).tensor_split((heads, heads + kv_heads), dim=2)
    k_cache[:, start : start + tokens] = _rotate(_head_norm(k, k_norm, eps), cos, sin).to(k_cache.dtype)
    v_cache[:, start : start + tokens] = v
    return _rotate(_head_norm(q, q_norm, eps), cos, sin).to(qkv.dtype)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)
