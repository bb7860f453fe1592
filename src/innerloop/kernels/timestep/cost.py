"""Cost of the time embedding."""

from innerloop.kernels.cost import Cost


def sincos(times: int, dim: int) -> Cost:
    """A sine or cosine counts as twenty flops."""
    return Cost(20 * times * dim, 4 * times * (dim + 1))
