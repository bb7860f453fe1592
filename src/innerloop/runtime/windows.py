"""The host's side of input and output buffers: pinned staging, partial writes, what changed."""

import numpy as np
import torch

from innerloop.contract.buffer import Buffer
from innerloop.contract.errors import ObservationError, PlanError

NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}


def host_dtype(buffer: Buffer) -> type[np.generic]:
    """The numpy dtype of a window. Raises PlanError for one that numpy has not (bfloat16)."""
    if buffer.dtype not in NUMPY:
        raise PlanError(f"window '{buffer.name}' is {buffer.dtype}, which the host cannot write: declare it float32")
    return NUMPY[buffer.dtype]


def fit(buffer: Buffer, value: np.ndarray) -> np.ndarray:
    """A value as the window has it: the batch axis may be left out when it is 1, the last axis may be shorter.

    Raises ObservationError for another dtype or shape.
    """
    array = np.asarray(value)
    if array.dtype != host_dtype(buffer):
        wanted = np.dtype(host_dtype(buffer))
        raise ObservationError(f"input '{buffer.name}' is {array.dtype}, not {wanted}: convert it with astype")
    if array.ndim == len(buffer.shape) - 1 and buffer.shape[0] == 1:
        array = array[None]
    same = array.ndim == len(buffer.shape) and array.shape[:-1] == buffer.shape[:-1]
    if not same or (array.ndim and not 0 < array.shape[-1] <= buffer.shape[-1]):
        raise ObservationError(
            f"input '{buffer.name}' has shape {list(np.shape(value))}, not {list(buffer.shape)} "
            "(the last axis may be shorter)"
        )
    return array
