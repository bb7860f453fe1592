"""One thread owns a device: calls from any thread are queued to it and wait for their answer."""

import contextvars
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class _Reply:
    """Where one calling thread waits; made once a thread, so that a call creates no lock."""

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until the answer is there
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None


class DeviceThread:
    """Runs callables one after another on a thread of its own, with one CUDA stream current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._queue: SimpleQueue[tuple[Callable[[], Any], _Reply]] = SimpleQueue()
        self._local = threading.local()
        self._thread = threading.Thread(target=self._work, name=f"innerloop {device}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the device's thread and returns its answer or raises its error."""
        if threading.current_thread() is self._thread:
            return function()
        reply = getattr(self._local, "reply", None) or _Reply()
        self._local.reply = None  # a wait that is interrupted must not leave a reply that is answered late
        self._queue.put((function, reply))
        reply.done.acquire()
        self._local.reply = reply
        value, error = reply.value, reply.error
        reply.value = reply.error = None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # a frame that holds its own traceback is a cycle
        result: T = value
        return result

    def settle(self) -> None:
        """Waits for all work on the device, on whatever stream it was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self.stream)
        while True:
            function, reply = self._queue.get()
            try:
                reply.value = function()
            except BaseException as error:  # handed over whole: it belongs to the thread that called
                reply.error = error
            reply.done.release()
            del function, reply  # an idle thread keeps nobody's policy alive


_threads: dict[torch.device, DeviceThread] = {}
_guard = threading.Lock()
os.register_at_fork(after_in_child=_threads.clear)


def owner(device: torch.device) -> DeviceThread:
    """The thread that owns a device in this process; started on first use, shared by every policy there."""
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with _guard:
        if device not in _threads:
            _threads[device] = DeviceThread(device)
        return _threads[device]


def in_context(function: Callable[[], T]) -> Callable[[], T]:
    """The function as it runs in the caller's context (choice of kernels), on whatever thread."""
    context = contextvars.copy_context()
    return lambda: context.run(function)
