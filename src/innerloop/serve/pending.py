"""Requests that wait for the worker: bounded, the newest of each robot, the most urgent first."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from innerloop.serve.protocol import Reply, Request

PATIENCE = 1.0  # seconds: where a request without a deadline stands among those with one


@dataclass(eq=False)
class Entry:
    """A request on its way; times are `time.perf_counter` seconds. `deliver` is called once, or never if abandoned."""

    request: Request
    client: str
    deliver: Callable[[Reply], None]
    arrived: float = field(default_factory=time.perf_counter)
    epoch: int = 0
    started: float = 0.0
    finished: float = 0.0
    abandoned: bool = False
    answered: bool = False

    @property
    def deadline(self) -> float:
        """The moment after which an answer is useless; infinity without a deadline."""
        limit = self.request.deadline_ms
        return math.inf if limit is None else self.arrived + limit / 1000

    @property
    def urgency(self) -> float:
        """Sort key: the smaller, the sooner it runs."""
        return min(self.deadline, self.arrived + PATIENCE) if self.request.deadline_ms is None else self.deadline


class Pending:
    """At most one entry per session and `capacity` in all. Not thread-safe: the worker holds its lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def sessions(self) -> list[str]:
        """Names of the sessions that have something waiting."""
        return list(self._entries)

    def full_for(self, session: str) -> bool:
        """Whether a request of this session would have no room."""
        return session not in self._entries and len(self._entries) >= self.capacity

    def put(self, entry: Entry) -> Entry | None:
        """Add an entry; returns the older one of the same session that it replaces."""
        older = self._entries.get(entry.request.session)
        self._entries[entry.request.session] = entry
        return older

    def drop(self, session: str) -> Entry | None:
        """Remove what a session has waiting."""
        return self._entries.pop(session, None)

    def drop_client(self, client: str) -> int:
        """Remove everything a vanished client has waiting; how many entries that were."""
        gone = [name for name, entry in self._entries.items() if entry.client == client]
        for name in gone:
            del self._entries[name]
        return len(gone)

    def drop_all(self) -> list[Entry]:
        """Empty the queue; returns what was in it."""
        entries = list(self._entries.values())
        self._entries.clear()
        return entries

    def take(self, largest: int, seconds: Mapping[int, float]) -> tuple[list[Entry], list[Entry]]:
        """The next batch, and the entries whose deadline has passed.

        `seconds` estimates a batch of each size seen so far: the batch is never so large that, by that
        estimate, its most urgent entry would be late.
        """
        now = time.perf_counter()
        late = [entry for entry in self._entries.values() if entry.deadline <= now]
        for entry in late:
            del self._entries[entry.request.session]
        ready = sorted(self._entries.values(), key=lambda entry: entry.urgency)
        size = min(largest, len(ready))
        while size > 1 and now + seconds.get(size, 0.0) > ready[0].deadline:
            size -= 1
        batch = ready[:size]
        for entry in batch:
            del self._entries[entry.request.session]
        return batch, late
