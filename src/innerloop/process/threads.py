"""Frames of one observation, each worked on by a thread where a core is free."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 3  # beside the caller's own: robots have up to four cameras

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` of each item, in order; it should release the interpreter's lock. Raises what `work` raises.

    The caller works too: on the first one, and then on what no thread has begun, as on a machine whose cores are busy.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    asked = [_threads().submit(work, item) for item in items[1:]]
    done: dict[int, Result] = {}
    try:
        done[0] = work(items[0])
        for at in range(len(asked), 0, -1):
            if asked[at - 1].cancel():
                done[at] = work(items[at])
    finally:
        for other in asked:
            if not other.cancel():
                other.exception()  # nothing reads the items any more once this returns
    return [done[at] if at in done else asked[at - 1].result() for at in range(len(items))]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "innerloop frames")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads stay behind in the parent
