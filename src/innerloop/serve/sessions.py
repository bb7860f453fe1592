"""Who is being served: one record per robot, ended when its last client leaves or falls silent."""

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from innerloop.serve.protocol import RequestError


@dataclass
class Session:
    """`epoch` counts episodes: an answer computed for an older epoch is never delivered."""

    name: str
    episode: str | int | None = None
    epoch: int = 0
    decisions: int = 0
    last_ms: float = 0.0
    seen: float = field(default_factory=time.monotonic)
    clients: set[str] = field(default_factory=set)
    images: Mapping[str, Any] = field(default_factory=dict)  # of the last observation, for the page


class Sessions:
    """A bounded table of sessions. Not thread-safe: the worker holds its lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._table: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._table)

    def get(self, name: str) -> Session | None:
        """The session, if it is open."""
        return self._table.get(name)

    def all(self) -> list[Session]:
        """Open sessions, oldest first."""
        return list(self._table.values())

    def join(self, name: str, client: str, at_work: Callable[[], Set[str]]) -> tuple[Session, list[str]]:
        """The session with this client in it, opened if need be, and the names of those that ended for it.

        In a full table a client's new session takes the place of its own that has been silent longest and is not
        `at_work`. Raises RequestError when it has none.
        """
        ended = []
        session = self._table.get(name)
        if session is None:
            if len(self._table) >= self.capacity:
                ended.append(self._longest_silent(client, at_work()))
                del self._table[ended[0]]
            session = self._table[name] = Session(name)
        session.clients.add(client)
        session.seen = time.monotonic()
        return session, ended

    def leave(self, client: str) -> list[str]:
        """Take a client out of its sessions; returns the names of those that ended with it."""
        ended = []
        for name, session in list(self._table.items()):
            session.clients.discard(client)
            if not session.clients:
                del self._table[name]
                ended.append(name)
        return ended

    def expire(self, seconds: float, at_work: Set[str]) -> list[str]:
        """End sessions that have been silent for so long and are not `at_work`; returns their names."""
        limit = time.monotonic() - seconds
        ended = [name for name, session in self._table.items() if session.seen < limit and name not in at_work]
        for name in ended:
            del self._table[name]
        return ended

    def _longest_silent(self, client: str, at_work: Set[str]) -> str:
        own = [each for each in self._table.values() if each.clients == {client} and each.name not in at_work]
        if not own:
            raise RequestError(
                "busy", f"all {self.capacity} sessions are open; close the client of one, or retry when one has ended"
            )
        return min(own, key=lambda each: each.seen).name
