"""Cost of attention."""

from innerloop.kernels.cost import Cost


def attention(tokens: int, keys: int, heads: int, kv_heads: int, dim: int, element: int = 2, batch: int = 1) -> Cost:
    """keys: those that are valid. Two products of tokens x keys x dim a head; q, k, v read, the result written."""
    flops = 4 * batch * tokens * keys * heads * dim
    moved = batch * dim * element * (2 * tokens * heads + 2 * keys * kv_heads)
    return Cost(flops, moved)


def rotary_attention(tokens: int, heads: int, dim: int, element: int = 2, batch: int = 1) -> Cost:
    """As attention over its own tokens; beside it three flops a rotated element, and fp32 angles."""
    angles = Cost(6 * batch * tokens * heads * dim, batch * tokens * dim * 4)
    return attention(tokens, tokens, heads, heads, dim, element, batch) + angles
