"""Cost of the few-row ops: the weight dominates, so bytes say what a device can do."""

from innerloop.kernels.attention import cost as attention_cost
from innerloop.kernels.cost import Cost


def norm_qkv_rope(rows: int, width: int, heads: int, kv_heads: int, dim: int, element: int = 2) -> Cost:
    """Weight, x, q and the new K/V rows once; fp32 scale, shift, cos and sin."""
    features = (heads + 2 * kv_heads) * dim
    return _product(rows, features, width, element) + Cost(0, 4 * (2 * width + rows * dim))


def norm_glu(rows: int, width: int, features: int, element: int = 2) -> Cost:
    """features: gates. The gate-up weight holds twice as many rows as there are results."""
    product = _product(rows, 2 * features, width, element)
    return product + Cost(0, 4 * 2 * width - element * rows * features)


def norm_linear(rows: int, width: int, features: int, element: int = 2) -> Cost:
    """Weight, x and the result once; fp32 scale and shift, the bias."""
    return _product(rows, features, width, element) + Cost(rows * features, 4 * 2 * width + element * features)


def norm_attend(tokens: int, keys: int, width: int, heads: int, dim: int, element: int = 2) -> Cost:
    """norm_linear of the query and attention over the valid keys, less the query, which stays inside."""
    query = norm_linear(tokens, width, heads * dim, element)
    mixed = attention_cost.attention(tokens, keys, heads, heads, dim, element)
    return query + mixed + Cost(0, -2 * element * tokens * heads * dim)


def project_residual(rows: int, features: int, width: int, element: int = 2) -> Cost:
    """Weight, y and residual read, the sum written; fp32 gate."""
    return _product(rows, features, width, element) + Cost(2 * rows * features, features * (rows * element + 4))


def attend(tokens: int, keys: int, heads: int, kv_heads: int, dim: int, batch: int = 1) -> Cost:
    """As attention over the valid keys."""
    return attention_cost.attention(tokens, keys, heads, kv_heads, dim, batch=batch)


def project_in(rows: int, actions: int, width: int, element: int = 2) -> Cost:
    """fp32 state, weight and bias read, the residual stream written."""
    return Cost(2 * rows * actions * width, 4 * (rows * actions + actions * width + width) + element * rows * width)


def norm_project_step(rows: int, width: int, actions: int, element: int = 2) -> Cost:
    """x, fp32 modulation, weight, bias and state read, the next state written."""
    moved = element * rows * width + 4 * (2 * width + actions * width + actions + 2 * rows * actions)
    return Cost(2 * rows * width * actions, moved)


def _product(rows: int, features: int, width: int, element: int) -> Cost:
    return Cost(2 * rows * features * width, element * (features * width + rows * (features + width)))
