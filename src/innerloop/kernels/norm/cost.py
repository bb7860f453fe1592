"""Cost of the norms."""

from innerloop.kernels.cost import Cost


def norm(rows: int, width: int, element: int = 2, added: bool = False, operands: int = 1) -> Cost:
    """added: with a residual, which is read and whose sum is written. operands: [D] vectors read (weight, shift...)."""
    moved = (4 if added else 2) * rows * width + operands * width
    per_element = 4 + operands + (1 if added else 0)
    return Cost(rows * width * per_element, moved * element)


def gated_add(rows: int, width: int, element: int = 2) -> Cost:
    """Two arrays and an fp32 gate read, one array written."""
    return Cost(2 * rows * width, 3 * rows * width * element + 4 * width)
