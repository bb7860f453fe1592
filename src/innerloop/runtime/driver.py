"""The device's stream, spoken to through the driver: a call of torch's costs the host two to four times as long
(docs/LOG.md), and a decision waits for four of them before its first kernel runs.
"""

import ctypes
import os
from collections.abc import Callable
from types import TracebackType

import torch

from innerloop.contract.errors import InnerloopError


class Driver:
    """Copies and graph launches on one stream, in order; `with` makes its context the calling thread's own.

    Made on a thread whose current device is the stream's. Raises InnerloopError for what the driver refuses.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._handle = ctypes.c_void_p(stream.cuda_stream)
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        place, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy_in = _function(library, "cuMemcpyHtoDAsync_v2", place, pointer, size, pointer)
        self._copy_out = _function(library, "cuMemcpyDtoHAsync_v2", pointer, place, size, pointer)
        self._launch = _function(library, "cuGraphLaunch", pointer, pointer)
        self._push = _function(library, "cuCtxPushCurrent_v2", pointer)
        self._pop = _function(library, "cuCtxPopCurrent_v2", pointer)
        self._context, self._popped = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(stream.device):  # makes the device's primary context the thread's
            stream.query()
            _checked(_function(library, "cuCtxGetCurrent", pointer)(ctypes.byref(self._context)), "cuCtxGetCurrent")

    def __enter__(self) -> "Driver":
        _checked(self._push(self._context), "cuCtxPushCurrent")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _checked(self._pop(ctypes.byref(self._popped)), "cuCtxPopCurrent")

    def copy_in(self, device: int, host: int, count: int) -> None:
        """Starts a copy of `count` bytes from pinned memory; both are addresses."""
        _checked(self._copy_in(device, host, count, self._handle), "cuMemcpyHtoDAsync")

    def copy_out(self, host: int, device: int, count: int) -> None:
        """Starts a copy of `count` bytes into pinned memory."""
        _checked(self._copy_out(host, device, count, self._handle), "cuMemcpyDtoHAsync")

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """What launches a captured graph, and keeps it alive."""
        handle = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))

        def launch(kept: torch.cuda.CUDAGraph = graph) -> None:
            _checked(self._launch(handle, self._handle), "cuGraphLaunch")

        return launch


def _function(library: ctypes.CDLL, name: str, *takes: type) -> Callable[..., int]:
    found = getattr(library, name)
    found.argtypes, found.restype = takes, ctypes.c_int
    return found  # type: ignore[no-any-return]


def _checked(error: int, name: str) -> None:
    if error:
        raise InnerloopError(f"{name} failed with CUDA driver error {error}")
