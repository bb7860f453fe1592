"""Action chunks played at the control rate while the next one is being made in a thread."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from innerloop.client.wire import Previous
from innerloop.execute import Executor, Mode, Ticket


class Answer(Protocol):
    """Whatever carries actions [horizon, action_dim]."""

    @property
    def actions(self) -> np.ndarray:
        """float32 [horizon, action_dim]."""
        ...


class ChunkPlayer:
    """Calls `infer` in a thread of its own while the robot moves; `step` never waits for it.

    `infer` is a remote or local policy's; its error is raised by the next `step`. mode, execute and blend are those of
    innerloop.execute.Executor; in modes realtime and prefix `infer` is also given `previous=`, what the new chunk is to continue.
    """

    def __init__(
        self,
        infer: Callable[..., Answer],
        rate_hz: float,
        mode: Mode = "asynchronous",
        execute: int | None = None,
        blend: int = 4,
    ) -> None:
        self.executor = Executor(rate_hz, mode, execute, blend)
        self._infer = infer
        self._changed = threading.Condition()
        self._asked: tuple[Mapping[str, Any], Ticket] | None = None
        self._busy = False
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="innerloop-player", daemon=True)
        self._thread.start()

    def step(self, observation: Mapping[str, Any]) -> np.ndarray | None:
        """One control tick: the action to execute now, or None while there is none (hold the last one)."""
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._busy and self.executor.due():
                self._asked = (observation, self.executor.ticket())
                self._busy = True
                self._changed.notify()
            return self.executor.next()

    def reset(self) -> None:
        """A new episode: drop what is queued and whatever is still under way, an error of the old one too."""
        with self._changed:
            self.executor.reset()
            self._error = None

    def close(self) -> None:
        """End the thread after the call under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._asked is None and not self._closed:
                    self._changed.wait()
                if self._closed or self._asked is None:
                    return
                observation, ticket = self._asked
                self._asked = None
            self._answer(observation, ticket)

    def _answer(self, observation: Mapping[str, Any], ticket: Ticket) -> None:
        left = ticket.continues
        continued = {} if left is None else {"previous": Previous(left, ticket.delay, schedule=ticket.schedule)}
        started = time.monotonic()
        try:
            actions: np.ndarray | None = self._infer(observation, **continued).actions
        except Exception as error:  # raised where the robot's loop can act on it
            actions = None
            failure: Exception | None = error
        else:
            failure = None
        with self._changed:
            self._busy = False
            if ticket.episode == self.executor.episode:
                self._error = failure
            if actions is not None:
                self.executor.answer(actions, ticket, time.monotonic() - started)
