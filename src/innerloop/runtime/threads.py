"""Work cut into shares, each taken by a thread where a core is free."""

import functools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

THREADS = 3  # beside the caller's own: robots have up to four cameras

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Share(Generic[Item, Result]):
    """One item: whoever takes the first lock works on it, and opens the second when it is done."""

    __slots__ = ("begun", "done", "error", "item", "result", "work")

    def __init__(self, work: Callable[[Item], Result], item: Item) -> None:
        self.work = work
        self.item = item
        self.result: Result
        self.error: BaseException | None = None
        self.begun, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        """Works on it unless somebody has begun."""
        if self.begun.acquire(blocking=False):
            try:
                self.result = self.work(self.item)
            except BaseException as error:  # handed over whole: it belongs to the thread that asked
                self.error = error
            self.done.release()

    def wait(self) -> None:
        """Returns when nobody works on it, now or later."""
        if not self.begun.acquire(blocking=False):
            self.done.acquire()
            self.done.release()


def in_turn(
    work: Callable[[Item], Result], items: Sequence[Item], threads: bool = True
) -> Generator[Result, None, None]:
    """`work` of each item, in order, each as soon as it is there; it should release the interpreter's lock.

    The caller works too, on what no thread has begun, as on a machine whose cores are busy; on everything where
    `threads` is false or there is one item. Raises what `work` raises. Nobody works on any item once this is closed.
    """
    if not threads or len(items) < 2:
        yield from map(work, items)
        return
    shares = [_Share(work, item) for item in items]
    waiting = _threads()
    for share in shares[1:]:
        waiting.put(share)
    try:
        for at, share in enumerate(shares):
            for other in shares[at:]:
                if share.done.locked():
                    other.run()
            share.wait()
            if share.error is not None:
                raise share.error
            yield share.result
    finally:
        for share in shares:
            share.wait()
            share.error = None  # a frame that holds its own traceback is a cycle


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` of each item, in order, as by `in_turn`."""
    return list(in_turn(work, items))


@functools.cache
def _threads() -> SimpleQueue[_Share[Any, Any]]:
    """Where the threads wait; they start when first asked for."""
    waiting: SimpleQueue[_Share[Any, Any]] = SimpleQueue()
    for number in range(THREADS):
        threading.Thread(target=_work, args=(waiting,), name=f"innerloop share {number}", daemon=True).start()
    return waiting


def _work(waiting: SimpleQueue[_Share[Any, Any]]) -> None:
    while True:
        share = waiting.get()
        share.run()
        del share  # an idle thread keeps nobody's frames alive


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads stay behind in the parent
