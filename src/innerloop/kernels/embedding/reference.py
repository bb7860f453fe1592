"""Rows of a table, scaled."""

import torch
from torch import Tensor


def embed(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    """table[tokens] * scale, the product in fp32."""
    rows = table.index_select(0, tokens.reshape(-1)).view(*tokens.shape, table.shape[1])
    return rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)


def interleave(tokens: Tensor, table: Tensor, rows: Tensor, visual: Tensor) -> Tensor:
    """visual[:, rows], and rows of the table in the first of these where there is no picture."""
    found = visual.index_select(1, rows.reshape(-1)).view(-1, *rows.shape, table.shape[1])
    text = embed(tokens, table, 1.0)
    return torch.cat([torch.where((rows == visual.shape[1] - 1)[..., None], text, found[0])[None], found[1:]])
