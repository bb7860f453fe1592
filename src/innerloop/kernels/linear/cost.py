"""Cost of a linear layer."""

from innerloop.kernels.cost import Cost


def linear(rows: int, columns: int, inner: int, element: int = 2, bias: bool = False) -> Cost:
    """rows x inner times inner x columns; weight, input and result moved once."""
    moved = rows * inner + inner * columns + rows * columns + (columns if bias else 0)
    return Cost(2 * rows * columns * inner + (rows * columns if bias else 0), moved * element)


def gated(rows: int, features: int, inner: int, element: int = 2) -> Cost:
    """features: of the result; twice as many columns are multiplied."""
    product = linear(rows, 2 * features, inner, element)
    return product + Cost(11 * rows * features, -rows * features * element)


def rotated(rows: int, heads: int, kv_heads: int, dim: int, inner: int, element: int = 2) -> Cost:
    """A product of whole heads, turned where it is made; fp32 cos and sin."""
    turned = rows * (heads + kv_heads) * dim
    return linear(rows, (heads + 2 * kv_heads) * dim, inner, element) + Cost(3 * turned, 4 * rows * dim)


def batched(layers: int, rows: int, columns: int, inner: int, element: int = 2) -> Cost:
    """As many linear layers, each with a bias."""
    one = linear(rows, columns, inner, element, bias=True)
    return Cost(layers * one.flops, layers * one.bytes)
