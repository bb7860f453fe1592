"""Cost of the last projection and the solver's update."""

from innerloop.kernels.cost import Cost


def project_and_step(rows: int, actions: int, width: int, element: int = 2) -> Cost:
    """The projection, and two flops an action for the update."""
    moved = element * (rows * width + actions * width + actions) + 8 * rows * actions
    return Cost(2 * rows * actions * (width + 1), moved)
