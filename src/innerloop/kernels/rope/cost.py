"""Cost of rotation and K/V write."""

from innerloop.kernels.cost import Cost


def rotate_and_store(tokens: int, heads: int, kv_heads: int, dim: int, element: int = 2, normed: bool = False) -> Cost:
    """Six flops a rotated pair; q, k and v read and written once, fp32 angles read once."""
    turned = tokens * (heads + kv_heads) * dim
    moved = 2 * tokens * (heads + 2 * kv_heads) * dim * element + tokens * dim * 4
    return Cost(turned * (3 + (4 if normed else 0)), moved)
