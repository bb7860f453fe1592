"""Cost of activations."""

from innerloop.kernels.cost import Cost


def activate(rows: int, width: int, element: int = 2) -> Cost:
    """About ten flops an element."""
    return Cost(10 * rows * width, 2 * rows * width * element)


def glu(rows: int, width: int, element: int = 2) -> Cost:
    """width: of the result; twice as much is read."""
    return Cost(11 * rows * width, 3 * rows * width * element)
