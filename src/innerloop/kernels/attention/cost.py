"""Cost of attention."""

from innerloop.kernels.cost import Cost


def attention(tokens: int, keys: int, heads: int, kv_heads: int, dim: int, element: int = 2, batch: int = 1) -> Cost:
    """keys: those that are valid. Two products of tokens x keys x dim a head; q, k, v read, the result written."""
    flops = 4 * batch * tokens * keys * heads * dim
    moved = batch * dim * element * (2 * tokens * heads + 2 * keys * kv_heads)
    return Cost(flops, moved)
