"""Softmax attention with grouped heads and a mask of valid keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.rope import reference as rope


def attention(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """softmax(scale * q k^T over the keys a query may see) v; zeros where it may see none."""
    batch, tokens, heads, dim = q.shape
    keys = k.shape[1]
    seen = None
    if causal:
        offset = keys - tokens
        row = torch.arange(tokens, device=q.device)[:, None]
        seen = (torch.arange(keys, device=q.device)[None, :] <= row + offset)[None, None]
    if key_valid is not None:
        valid = key_valid != 0
        # 0 * NaN is NaN: what lies in rows that nobody wrote must not reach the sum.
        k, v = (t.masked_fill(~valid[:, :, None, None], 0.0) for t in (k, v))
        seen = valid[:, None, None, :] if seen is None else seen & valid[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if seen is None else seen.expand(batch, 1, tokens, keys),
        scale=scale,
        enable_gqa=heads != k.shape[2],
    )
    if seen is not None:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim)


def remembered(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float) -> Tensor:
    """attention; what the caller promises only lets a kernel read earlier."""
    return attention(q, k, v, key_valid, scale)


def continued(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """attention; `start` only tells which rows are new."""
    return attention(q, k, v, key_valid, scale)


def rotary_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_valid: Tensor | None, scale: float
) -> Tensor:
    """attention of what rotate_and_store makes of qkv."""
    batch, tokens, width = qkv.shape
    k, v = (qkv.new_empty(batch, tokens, heads, width // (3 * heads)) for _ in range(2))
    q = rope.rotate_and_store(qkv, cos, sin, heads, heads, k, v, 0)
    return attention(q, k, v, key_valid, scale)
