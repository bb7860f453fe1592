"""What the kernels ask of the tensors they are given."""

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError
from innerloop.kernels.skinny.packing import Packed


def need_bias(bias: Tensor, weight: Packed) -> None:
    """Raises InnerloopError unless it is bfloat16, one a row of the weight."""
    if bias.dtype is not torch.bfloat16 or bias.shape != (weight.rows,):
        raise InnerloopError(f"the bias must be bfloat16 [{weight.rows}], not {bias.dtype} {list(bias.shape)}")


def modulation(scale: Tensor | None, shift: Tensor | None, eps: float) -> dict[str, int | float | None]:
    """A norm's arguments by name. Raises InnerloopError unless scale and shift, where both are there, have one dtype."""
    if scale is not None and shift is not None and scale.dtype is not shift.dtype:
        raise InnerloopError(f"scale is {scale.dtype} and shift {shift.dtype}; give both one dtype")
    pointers = (None if table is None else table.data_ptr() for table in (scale, shift))
    return {**dict(zip(("scale", "shift"), pointers, strict=True)), "eps": eps}


def is_float(table: Tensor | None) -> int:
    """What MODULATION_FLOAT is: 1 where the table is float32, or there is none."""
    return int(table is None or table.dtype is torch.float32)


def strides(names: str, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Of an entry and of a row, in elements; raises InnerloopError unless both lie alike, rows whole."""
    if k.stride() != v.stride() or k.stride(3) != 1 or k.stride(2) != k.shape[3]:
        raise InnerloopError(f"{names} must share one layout [B, S, heads, D] with whole rows; got {k.stride()}")
    return k.stride(0), k.stride(1)


def need_contiguous(name: str, tensor: Tensor) -> None:
    """Raises InnerloopError where it is not."""
    if not tensor.is_contiguous():
        raise InnerloopError(f"{name} must be contiguous, not strided as {tensor.stride()}")
