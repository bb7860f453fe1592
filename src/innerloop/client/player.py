"""Action chunks played at the control rate: a new chunk is spliced in at the step the robot has really reached."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from innerloop.client.wire import Previous

WINDOW = 50  # latencies that the delay estimate remembers
PERCENTILE = 90.0


class Answer(Protocol):
    """Whatever carries actions [horizon, action_dim]."""

    @property
    def actions(self) -> np.ndarray:
        """float32 [horizon, action_dim]."""
        ...


@dataclass(frozen=True)
class Ticket:
    """When an observation was taken: the episode, and how many actions had been executed by then."""

    episode: int
    executed: int


class ActionQueue:
    """The actions still to be executed, and where a chunk that took a while joins them.

    `rate_hz` is the control rate; `blend` the steps over which old and new plan are cross-faded.
    """

    def __init__(self, rate_hz: float, blend: int = 4) -> None:
        self.rate_hz = rate_hz
        self.blend = blend
        self.episode = 0
        self.executed = 0
        self.starved = 0  # control ticks of this episode without an action
        self._actions = np.empty((0, 0), np.float32)
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._actions)

    def ticket(self) -> Ticket:
        """To be taken with the observation and given back with its chunk."""
        return Ticket(self.episode, self.executed)

    def measure(self, seconds: float) -> None:
        """Remember the latency of one warm request; slow first calls are not to be counted."""
        self._seconds.append(seconds)

    @property
    def delay(self) -> int:
        """Steps between an observation and its first usable action: a windowed percentile, rounded up."""
        if not self._seconds:
            return 0
        return math.ceil(float(np.percentile(self._seconds, PERCENTILE)) * self.rate_hz - 1e-9)

    def due(self, margin: int = 1) -> bool:
        """Whether a new chunk must be asked for now to arrive in time; always, until a latency is known."""
        return not self._seconds or len(self._actions) <= self.delay + margin

    def splice(self, actions: np.ndarray, ticket: Ticket) -> bool:
        """Take over a chunk from the step really reached since its observation; False if its episode is over."""
        if ticket.episode != self.episode:
            return False
        fresh = np.asarray(actions, np.float32)[self.executed - ticket.executed :]
        shared = min(self.blend, len(self._actions), len(fresh))
        if shared:
            weight = np.arange(1, shared + 1, dtype=np.float32)[:, None] / (shared + 1)
            older = self._actions[:shared]
            fresh = np.concatenate([older + weight * (fresh[:shared] - older), fresh[shared:]])
        self._actions = fresh
        return True

    def next(self) -> np.ndarray | None:
        """The action of this control tick; None when there is none, and then no step counts as executed."""
        if not len(self._actions):
            self.starved += 1
            return None
        action: np.ndarray = self._actions[0]
        self._actions = self._actions[1:]
        self.executed += 1
        return action

    def remaining(self) -> Previous | None:
        """What a new chunk is to continue; None while nothing is queued."""
        return Previous(self._actions, min(self.delay, len(self._actions) - 1)) if len(self._actions) else None

    def reset(self) -> None:
        """A new episode: nothing of the old one is played, whenever it arrives."""
        self.episode += 1
        self.executed = 0
        self.starved = 0
        self._actions = self._actions[:0]


class ChunkPlayer:
    """Calls `infer` in a thread of its own while the robot moves; `step` never waits for it.

    `infer` is a remote or local policy's; its error is raised by the next `step`. With `rtc` it is also given
    `previous=`, so that the policy itself makes the new chunk continue the old one.
    """

    def __init__(self, infer: Callable[..., Answer], rate_hz: float, blend: int = 4, rtc: bool = False) -> None:
        self._rtc = rtc
        self.queue = ActionQueue(rate_hz, blend)
        self._infer = infer
        self._changed = threading.Condition()
        self._asked: tuple[Mapping[str, Any], Ticket, Previous | None] | None = None
        self._busy = False
        self._warm = False
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
            if not self._busy and self.queue.due():
                self._asked = (observation, self.queue.ticket(), self.queue.remaining() if self._rtc else None)
                self._busy = True
                self._changed.notify()
            return self.queue.next()

    def reset(self) -> None:
        """A new episode: drop what is queued and whatever is still under way."""
        with self._changed:
            self.queue.reset()

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
                observation, ticket, previous = self._asked
                self._asked = None
            self._answer(observation, ticket, {} if previous is None else {"previous": previous})

    def _answer(self, observation: Mapping[str, Any], ticket: Ticket, continued: dict[str, Previous]) -> None:
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
            self._error = failure
            if actions is not None:
                if self._warm:
                    self.queue.measure(time.monotonic() - started)
                self._warm = True
                self.queue.splice(actions, ticket)
