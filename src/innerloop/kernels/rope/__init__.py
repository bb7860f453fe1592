"""Rotary position embedding, optional per-head q/k norm, and the K/V write, as one op."""

from torch import Tensor

from innerloop.kernels.rope import reference
from innerloop.kernels.select import chosen


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
    """qkv [B, T, (Hq + 2 Hkv) D], cos and sin [B, T, D/2], caches [B, S, Hkv, D] -> rotated q [B, T, Hq, D].

    k and v are written to cache rows start .. start + T. q_norm and k_norm [D] are RMS weights applied first.
    """
    run = chosen(reference.rotate_and_store, qkv)
    return run(qkv, cos, sin, heads, kv_heads, k_cache, v_cache, start, q_norm, k_norm, eps)
