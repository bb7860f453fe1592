"""Weights in the order in which a program's matrix fragments read them, and back."""

from dataclasses import dataclass

import torch

from innerloop.contract.errors import InnerloopError

WARP_COLUMNS = 128  # columns of the weight that one warp multiplies


@dataclass(frozen=True)
class Packed:
    """A dense [rows, columns] weight in fragment order. pair: rows r and r + pair lie in one lane's registers.

    kept: the dense weight too, where more rows than the few-row kernels take are multiplied by it as well.
    """

    data: torch.Tensor  # flat, rows * columns
    rows: int
    columns: int
    pair: int
    kept: torch.Tensor | None = None


def pack(weight: torch.Tensor, pair: int = 8, keep: bool = False) -> Packed:
    """weight [N, K] in fragment order of mma.m16n8k16 (PTX ISA, 9.7.14): each 16-row tile contiguous.

    pair: 8 for a plain product, head_dim / 2 for a QKV weight that is rotated, N / 2 for a gate-up weight.
    keep: hold on to the dense weight, for calls of more rows than the few-row kernels take.
    """
    n, k = weight.shape
    if n % (2 * pair) or pair % 8 or k % 32:
        raise InnerloopError(
            f"a weight of shape {n}x{k} cannot be packed in pairs {pair} apart: rows must be a multiple of "
            f"{2 * pair}, the distance of 8, columns of 32; use the dense weight"
        )
    # group, half, tile, row, block, lane column, step, low or high, element
    parts = weight.reshape(n // (2 * pair), 2, pair // 8, 8, k // 32, 4, 2, 2, 2)
    data = parts.permute(0, 2, 4, 6, 3, 5, 7, 1, 8).reshape(-1)
    return Packed(data.contiguous(), n, k, pair, weight if keep else None)


def unpack(packed: Packed) -> torch.Tensor:
    """The dense [rows, columns] weight, bit for bit."""
    n, k, pair = packed.rows, packed.columns, packed.pair
    parts = packed.data.reshape(n // (2 * pair), pair // 8, k // 32, 2, 8, 4, 2, 2, 2)
    return parts.permute(0, 7, 1, 4, 2, 5, 3, 6, 8).reshape(n, k)
