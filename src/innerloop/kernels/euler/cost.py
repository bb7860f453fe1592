"""Cost of the first and the last projection, the solver's update and its guidance."""

from innerloop.kernels.cost import Cost


def project_in(rows: int, actions: int, width: int, element: int = 2) -> Cost:
    """fp32 actions and weights, 16-bit rows."""
    moved = 4 * (rows * actions + actions * width + width) + element * rows * width
    return Cost(2 * rows * actions * width, moved)


def project_and_step(rows: int, actions: int, width: int, element: int = 2) -> Cost:
    """The projection, and two flops an action for the update."""
    moved = element * (rows * width + actions * width + actions) + 8 * rows * actions
    return Cost(2 * rows * actions * (width + 1), moved)


def guide(rows: int, actions: int) -> Cost:
    """Seven flops an action; three arrays and a weight a row read, one array written."""
    return Cost(7 * rows * actions, 16 * rows * actions + 4 * rows)


def impose(rows: int, actions: int) -> Cost:
    """One array read, one written."""
    return Cost(0, 8 * rows * actions)
