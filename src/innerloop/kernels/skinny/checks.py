"""What the kernels ask of the tensors they are given."""

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError
from innerloop.kernels.skinny.packing import Packed


def need_bias(bias: Tensor, weight: Packed) -> None:
    """Raises InnerloopError unless it is bfloat16, one a row of the weight."""
    if bias.dtype is not torch.bfloat16 or bias.shape != (weight.rows,):
        raise InnerloopError(f"the bias must be bfloat16 [{weight.rows}], not {bias.dtype} {list(bias.shape)}")


def is_float(modulation: Tensor | None) -> int:
    """What MODULATION_FLOAT is: 1 where the table is float32, or there is none."""
    return int(modulation is None or modulation.dtype is torch.float32)


def strides(names: str, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Of an entry and of a row, in elements; raises InnerloopError unless both lie alike, rows whole."""
    if k.stride() != v.stride() or k.stride(3) != 1 or k.stride(2) != k.shape[3]:
        raise InnerloopError(f"{names} must share one layout [B, S, heads, D] with whole rows; got {k.stride()}")
    return k.stride(0), k.stride(1)


def need_contiguous(name: str, tensor: Tensor) -> None:
    """Raises InnerloopError where it is not."""
    if not tensor.is_contiguous():
        raise InnerloopError(f"{name} must be contiguous, not strided as {tensor.stride()}")
