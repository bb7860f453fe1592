"""One turn after another on a device: on a thread of its own, or on the calling thread, which spares two hand-overs."""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from innerloop.runtime.queue import Queue

T = TypeVar("T")


class _Reply:
    """Where one calling thread waits; made once a thread, so that a call creates no lock."""

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until the answer is there
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None


class Ending(Generic[T]):
    """What is left of a call once the device has all its work: to wait, and to take the answer.

    The thread that called does it, so that no thread has to be woken when the device is done; where another call
    comes first, the device's thread does.
    """

    __slots__ = ("_error", "_guard", "_take", "_value", "_wait")

    def __init__(self, wait: Callable[[], None], take: Callable[[], T], guard: threading.Lock) -> None:
        self._wait = wait
        self._take: Callable[[], T] | None = take
        self._guard = guard
        self._value: T
        self._error: BaseException | None = None

    def answer(self) -> T:
        """Waits and returns the answer, or raises what the wait raises. An interrupt leaves it to the device's thread."""
        self._finish()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # a frame that holds its own traceback is a cycle
        return self._value

    def settle(self) -> None:
        """The same for the device's thread: an error is left to the thread that called."""
        try:
            self._finish()
        except BaseException as error:  # handed over whole, as in a call
            self._error, self._take, self._wait = error, None, _nothing

    def _finish(self) -> None:
        if self._take is None:
            return
        self._wait()  # without the guard: two threads may wait for one device
        with self._guard:
            if self._take is not None:
                self._value = self._take()
                self._take, self._wait = None, _nothing  # an idle thread keeps nobody's policy alive


class DeviceThread:
    """Runs callables one after another: on its own thread with the device's one CUDA stream current (`call`), or on the
    thread that asks (`here`).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.queue: Queue | None = None  # of the stream, once `opened`
        self._calls: SimpleQueue[tuple[Callable[[], Any], _Reply]] = SimpleQueue()
        self._local = threading.local()
        self._left: Ending[Any] | None = None
        self._guard = threading.Lock()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"innerloop {device}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the device's thread and returns its answer or raises its error."""
        if threading.current_thread() is self._thread:
            self._settle_last()
            return function()
        reply = getattr(self._local, "reply", None) or _Reply()
        self._local.reply = None  # a wait that is interrupted must not leave a reply that is answered late
        self._calls.put((function, reply))
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

    def here(self, function: Callable[[], T]) -> T:
        """Runs a function on the calling thread when its turn has come, and returns its answer.

        For what starts work on the device and returns: nobody is woken for it, and nobody else has a turn meanwhile. It
        must not depend on the caller's modes of torch, nor `call`, and names the stream (`on_stream`): making it torch's
        current one takes longer than all else. A thread that captures a graph hands over instead.
        """
        if threading.current_thread() is self._thread or self._captures():
            return self.call(function)
        with self._turn, self.queue or nullcontext():
            self._settle_last()
            return function()

    def opened(self) -> Queue | None:
        """The stream's queue, made on the device's own thread when first asked for; None without a GPU."""
        if self.queue is None and self.stream is not None:
            self.queue = Queue(self.stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        return self.queue

    def on_stream(self) -> AbstractContextManager[object]:
        """The device's stream as torch's current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def leave(self, wait: Callable[[], None], take: Callable[[], T]) -> Ending[T]:
        """Last thing in a call: leaves the wait for the device and the answer to the caller.

        wait may be asked by two threads, and again after an interrupt; take runs once, before the next call.
        """
        self._left = ending = Ending(wait, take, self._guard)
        return ending

    def end(self, ending: Ending[T]) -> T:
        """The answer of a call that left its ending; waits on this thread. Raises what the wait raises."""
        if self.device.type != "cuda":
            return ending.answer()
        elsewhere = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if elsewhere else nullcontext():
            if self._captures():  # a thread that captures must wait for nothing
                self.call(_nothing)
            return ending.answer()

    def _captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

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
            function, reply = self._calls.get()
            try:
                with self._turn:
                    self._settle_last()
                    reply.value = function()
            except BaseException as error:  # handed over whole: it belongs to the thread that called
                reply.error = error
            reply.done.release()
            del function, reply  # an idle thread keeps nobody's policy alive

    def _settle_last(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.settle()


def _nothing() -> None:
    return


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
