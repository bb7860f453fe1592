"""The device's stream, spoken to through CUDA's runtime: calls of torch's cost the host two to four times as long
(docs/LOG.md), and a decision waits for four of them before its first kernel runs.
"""

import ctypes
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from innerloop.contract.errors import InnerloopError

TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Queue:
    """Copies and graph launches on one stream, in order; `with` makes its device the calling thread's own.

    aside: another stream, for copies that need not wait for what the first one is at (`copy_aside`, `join`). Raises
    InnerloopError for what CUDA refuses.
    """

    def __init__(self, stream: torch.cuda.Stream, aside: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._device, self._handle = stream.device_index, ctypes.c_void_p(stream.cuda_stream)
        self._aside, self._joint = aside, None if aside is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._aside_handle = self._handle if aside is None else ctypes.c_void_p(aside.cuda_stream)
        place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library = _loaded(_library())
        self._memcpy = _function(library, "cudaMemcpyAsync", place, place, size, number, place)
        self._launch = _function(library, "cudaGraphLaunch", place, place)
        self._get_device = _function(library, "cudaGetDevice", ctypes.POINTER(number))
        self._set_device = _function(library, "cudaSetDevice", number)
        self._before = number()

    def __enter__(self) -> "Queue":
        self._get_device(ctypes.byref(self._before))
        if self._before.value != self._device:
            self._set_device(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before.value != self._device:
            self._set_device(self._before.value)

    def copy_in(self, device: int, host: int, count: int) -> None:
        """Starts a copy of `count` bytes from pinned memory; both are addresses."""
        self._memcpy(device, host, count, TO_DEVICE, self._handle)

    def copy_aside(self, device: int, host: int, count: int) -> None:
        """As `copy_in`, beside what the stream is at; what it does next may begin before, until it is told to `join`."""
        self._memcpy(device, host, count, TO_DEVICE, self._aside_handle)

    def join(self) -> None:
        """What the stream is asked from here on waits for the copies aside."""
        if self._joint is not None:
            self._joint.record(self._aside)
            self.stream.wait_event(self._joint)

    def copy_out(self, host: int, device: int, count: int) -> None:
        """Starts a copy of `count` bytes into pinned memory."""
        self._memcpy(host, device, count, TO_HOST, self._handle)

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """What launches a captured graph, and keeps it alive."""
        handle = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))

        def launch(kept: torch.cuda.CUDAGraph = graph) -> None:
            self._launch(handle, self._handle)

        return launch


def _loaded(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise InnerloopError(
            f"the CUDA runtime {name} cannot be loaded ({error}): install a CUDA build of torch from pip, which brings it, or "
            "put its directory on the loader's path"
        ) from error


def _library() -> str:
    """The runtime that torch has loaded."""
    major = str(torch.version.cuda).partition(".")[0]
    return f"cudart64_{major}.dll" if os.name == "nt" else f"libcudart.so.{major}"


def _function(library: Any, name: str, *takes: Any) -> Callable[..., None]:
    found: Any = library[name]
    found.argtypes, found.restype = takes, ctypes.c_int

    def checked(error: int, *_: Any) -> None:
        if error:
            raise InnerloopError(f"{name} failed: CUDA error {error}")

    found.errcheck = checked
    return found  # type: ignore[no-any-return]
