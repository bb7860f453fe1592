"""Rows of a table, scaled."""

from torch import Tensor


def embed(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    """table[tokens] * scale, the product in fp32."""
    rows = table.index_select(0, tokens.reshape(-1)).view(*tokens.shape, table.shape[1])
    return rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)
