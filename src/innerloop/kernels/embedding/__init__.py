"""Embedding gather and scale."""

from torch import Tensor

from innerloop.kernels.embedding import reference
from innerloop.kernels.select import chosen


def embed(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    """tokens int32 [B, T], table [V, D] -> table[tokens] * scale, [B, T, D] in the table's dtype."""
    return chosen(reference.embed, table)(tokens, table, scale)


def interleave(tokens: Tensor, table: Tensor, rows: Tensor, visual: Tensor) -> Tensor:
    """tokens and rows int32 [B, T], table [V, D], visual [L, R, D] -> visual[:, rows], [L, B, T, D].

    Where a row is the last one, R - 1, the first of the L has table[token] in its place.
    """
    return chosen(reference.interleave, table)(tokens, table, rows, visual)
