"""msgpack with numpy arrays, byte for byte in the layout of openpi's clients.

Decoding builds plain data only: no class, no callable, no object array can come out of a message.
Layout: packages/openpi-client/src/openpi_client/msgpack_numpy.py of Physical-Intelligence/openpi.
"""

import math
import threading
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

MAX_ITEMS = 4096  # of one list or map: a header may not make the reader reserve more than 32 KiB
MAX_TEXT = 1 << 20  # bytes of one string


class MessageError(ValueError):
    """A message is not what the protocol allows; the text says what and why."""


class _Local(threading.local):
    """A packer a thread, kept: its buffer's pages are touched once, not once a message."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_pack_array)


def pack(value: Any) -> bytes:
    """Plain data and numpy arrays (bool, int, float of any width) to bytes."""
    return bytes(_local.packer.pack(value))


def unpack(data: bytes) -> Any:
    """Bytes to plain data. Arrays are read-only views into the message. Raises MessageError."""
    try:
        return msgpack.unpackb(
            data,
            object_hook=_unpack_array,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_str_len=MAX_TEXT,
            max_ext_len=0,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise MessageError(f"the message is not msgpack that this protocol allows: {error}") from error


def keep_large_blocks() -> None:
    """Make glibc reuse blocks of up to 32 MiB instead of mapping and touching new pages for each message.

    Freeing a mapped block raises the allocator's mmap threshold to its size (mallopt(3), M_MMAP_THRESHOLD): a
    message of 1.3 MB then costs 2.1 ms round trip instead of 3.6. Elsewhere it does nothing.
    """
    bytearray((32 << 20) - (1 << 16))


def array_dtype(name: Any) -> np.dtype[Any]:
    """The dtype of an array on the wire: bool, integer or float. Raises MessageError for all others."""
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    if not isinstance(name, str) or len(name) > 8:
        raise MessageError("an array's dtype is not a short string such as '|u1' or '<f4'")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise MessageError(f"'{name}' is not a dtype; send uint8, int or float arrays") from error
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype.subdtype is not None:
        raise MessageError(f"arrays of dtype '{name}' are refused; send uint8, int or float arrays")
    return dtype


def array_from(data: Any, dtype: np.dtype[Any], shape: Any) -> np.ndarray:
    """A read-only array over `data`. Raises MessageError unless the shape accounts for every byte."""
    if not isinstance(data, (bytes, bytearray)):
        raise MessageError("an array's data is not a byte string")
    if not isinstance(shape, (list, tuple)) or len(shape) > 8:
        raise MessageError("an array's shape is not a list of at most 8 sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise MessageError("an array's shape holds something that is not a size")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError(f"an array of shape {tuple(shape)} and dtype {dtype} does not have {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"arrays of dtype {value.dtype} cannot be sent; send uint8, int or float arrays")
        data = np.ascontiguousarray(value)
        return {
            b"__ndarray__": True,
            b"data": data.data if data.size else b"",
            b"dtype": data.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} cannot be sent; send numbers, text, lists, maps and numpy arrays")


def _unpack_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return array_from(value.get(b"data"), array_dtype(value.get(b"dtype")), value.get(b"shape"))
    if b"__npgeneric__" in value:
        number = value.get(b"data")
        if not isinstance(number, (bool, int, float)):
            raise MessageError("a numpy scalar's data is not a number")
        try:
            return array_dtype(value.get(b"dtype")).type(number)
        except OverflowError as error:
            raise MessageError(f"a numpy scalar does not fit its dtype: {error}") from error
    return value


_local = _Local()
