"""Cost of an embedding gather."""

from innerloop.kernels.cost import Cost


def embed(tokens: int, width: int, element: int = 2) -> Cost:
    """One multiplication an element; a row is read and written."""
    return Cost(tokens * width, tokens * (2 * width * element + 4))


def interleave(layers: int, tokens: int, width: int, element: int = 2) -> Cost:
    """A row a layer and token is read and written; a token and a place each."""
    return Cost(0, tokens * (2 * layers * width * element + 8))
