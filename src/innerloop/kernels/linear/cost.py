"""Cost of a linear layer."""

from innerloop.kernels.cost import Cost


def linear(rows: int, columns: int, inner: int, element: int = 2, bias: bool = False) -> Cost:
    """rows x inner times inner x columns; weight, input and result moved once."""
    moved = rows * inner + inner * columns + rows * columns + (columns if bias else 0)
    return Cost(2 * rows * columns * inner + (rows * columns if bias else 0), moved * element)


def batched(layers: int, rows: int, columns: int, inner: int, element: int = 2) -> Cost:
    """As many linear layers, each with a bias."""
    one = linear(rows, columns, inner, element, bias=True)
    return Cost(layers * one.flops, layers * one.bytes)
