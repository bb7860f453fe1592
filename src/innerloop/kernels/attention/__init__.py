"""Attention: full, causal, with a mask of valid keys, with few queries; over cached keys or a layer's own projection."""

from torch import Tensor

from innerloop.kernels import rope
from innerloop.kernels.attention import reference
from innerloop.kernels.select import chosen, on_device, unfused

# Every tile of queries rotates all keys anew: beyond this, rotating them once costs less.
FEW_TOKENS, WIDEST = 256, 64


def attention(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """q [B, T, Hq, D], k and v [B, S, Hkv, D], key_valid int32 [B, S] or None -> [B, T, Hq * D].

    Query head h reads K/V head h // (Hq / Hkv). Causal: query i sees keys up to i + S - T. Softmax in fp32.
    A query that may see no key gives zeros. Blocks of keys without a valid one are skipped on the device.
    """
    return chosen(reference.attention, q)(q, k, v, key_valid, scale, causal)


def remembered(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float) -> Tensor:
    """As `attention`, of keys and values that were there before: within `launch.dependent_launch` they are read ahead too."""
    if unfused(q):
        return attention(q, k, v, key_valid, scale)
    return chosen(reference.remembered, q)(q, k, v, key_valid, scale)


def continued(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """As `attention`, of tokens whose own keys and values are the rows from `start` on.

    Within `launch.dependent_launch` the rows before are read ahead too.
    """
    if unfused(q):
        return attention(q, k, v, key_valid, scale)
    return chosen(reference.continued, q)(q, k, v, key_valid, scale, start)


def rotary_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_valid: Tensor | None, scale: float
) -> Tensor:
    """`rope.rotate_and_store` and `attention` where no later op reads the rotated keys.

    qkv [B, T, 3 H D], cos and sin [B, T, D/2], key_valid int32 [B, T] or None -> [B, T, H * D].
    """
    tokens, dim = qkv.shape[1], qkv.shape[2] // (3 * heads)
    if unfused(qkv) or (on_device(qkv) and (tokens > FEW_TOKENS or dim > WIDEST)):
        k, v = (qkv.new_empty(len(qkv), tokens, heads, dim) for _ in range(2))
        q = rope.rotate_and_store(qkv, cos, sin, heads, heads, k, v, 0)
        return attention(q, k, v, key_valid, scale)
    return chosen(reference.rotary_attention, qkv)(qkv, cos, sin, heads, key_valid, scale)
