"""One executor of action chunks for every way of overlapping inference with motion."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from innerloop.execute.delay import Delay

Mode = Literal["synchronous", "asynchronous", "ensemble", "realtime", "prefix"]
MODES: tuple[Mode, ...] = get_args(Mode)
_SCHEDULES: dict[Mode, str] = {"realtime": "LINEAR", "prefix": "PREFIX"}  # of the modes that continue a chunk
_DECAY = 0.01  # temporal ensembling, weight exp(-0.01 i), oldest chunk i = 0 (ACT, arXiv:2304.13705)


@dataclass(frozen=True)
class Ticket:
    """What was true when an observation was taken: to be given back with the chunk made from it.

    executed: actions of the episode until then. continues: float32 [n, action_dim], what was still to be executed, and
    delay, the steps of it that will pass meanwhile; None where the policy is not to continue anything. schedule: that of
    innerloop.Previous.
    """

    episode: int
    executed: int
    continues: np.ndarray | None = None
    delay: int = 0
    schedule: str = "LINEAR"


@dataclass(frozen=True)
class _Chunk:
    start: int  # the step of the episode that row 0 was made for
    actions: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.actions)


class Executor:
    """The actions still to be executed, when the next chunk is due, and where it joins.

    synchronous: the robot holds still while a chunk is made. asynchronous: the old chunk goes on meanwhile, and the new
    one is entered at the step really reached, cross-faded over `blend` steps. ensemble: every step is the weighted mean
    of all chunks that foresaw it. realtime: as asynchronous, but the policy is told what it continues. prefix: as
    realtime, for policies trained so: what will pass meanwhile are the first actions of the new chunk.

    execute: steps from one observation to the next (default: all of a chunk when synchronous, as many as the delay
    leaves otherwise, 1 for an ensemble). Chunks of an earlier episode are never executed.
    """

    def __init__(self, rate_hz: float, mode: Mode = "asynchronous", execute: int | None = None, blend: int = 4) -> None:
        if mode not in MODES:
            raise ValueError(f"there is no execution mode {mode!r}; choose of {', '.join(MODES)}")
        if execute is not None and execute < 1:
            raise ValueError(f"execute is {execute}; a chunk executes at least one action")
        if not rate_hz > 0 or blend < 0:
            raise ValueError(f"rate_hz is {rate_hz}, blend {blend}; a rate is above 0 Hz, a cross-fade 0 steps or more")
        self.mode, self.delay = mode, Delay(rate_hz)
        self.execute = 1 if mode == "ensemble" and execute is None else execute
        self.blend = blend if mode == "asynchronous" else 0
        self.episode = 0
        self.executed = 0
        self.starved = 0  # control ticks of this episode without an action
        self.joins: list[int] = []  # steps of this episode at which other chunks took over
        self._chunks: list[_Chunk] = []
        self._asked = 0
        self._warm = False

    def __len__(self) -> int:
        """Actions that could still be executed without another chunk."""
        return max((chunk.end for chunk in self._chunks), default=self.executed) - self.executed

    def due(self, margin: int = 1) -> bool:
        """Whether an observation is to be taken now; the caller asks for one chunk at a time."""
        if not len(self):
            return True
        if self.mode == "synchronous":
            return False
        if self.execute is not None and self.executed - self._asked >= self.execute:
            return True
        return not self.delay.known or len(self) <= self.delay.steps + margin

    def ticket(self) -> Ticket:
        """To be taken with the observation."""
        self._asked = self.executed
        if self.mode not in _SCHEDULES or not len(self):
            return Ticket(self.episode, self.executed)
        left = self._chunks[-1].actions[self.executed - self._chunks[-1].start :]
        return Ticket(self.episode, self.executed, left, min(self.delay.steps, len(left) - 1), _SCHEDULES[self.mode])

    def answer(self, actions: np.ndarray, ticket: Ticket, seconds: float | None = None) -> bool:
        """Takes over a chunk float [n, action_dim]; False if its episode is over.

        seconds: from observation to answer, which feeds the delay estimate; the first call of all does not.
        """
        if seconds is not None and self._warm:
            self.delay.measure(seconds)
        self._warm = True
        if ticket.episode != self.episode:
            return False
        fresh = _Chunk(ticket.executed, np.asarray(actions, np.float32))
        if fresh.end <= self.executed:  # all of it is past
            return False
        if self.executed:
            self.joins.append(self.executed)
        if self.mode == "synchronous":
            fresh = _Chunk(fresh.start, fresh.actions[: self.execute])
        elif self.mode == "asynchronous":
            fresh = self._blended(fresh)
        self._chunks = [*self._alive(), fresh] if self.mode == "ensemble" else [fresh]
        return True

    def next(self) -> np.ndarray | None:
        """The action of this control tick; None when there is none, and then no step counts as executed."""
        chunks = self._alive()
        if not chunks:
            self.starved += 1
            return None
        if len(chunks) < len(self._chunks):  # a mean that loses one of its chunks jumps too
            self._chunks = chunks
            self.joins.append(self.executed)
        rows = np.stack([chunk.actions[self.executed - chunk.start] for chunk in chunks])
        weights = np.exp(-_DECAY * np.arange(len(rows), dtype=np.float32))
        self.executed += 1
        action: np.ndarray = rows[0] if len(rows) == 1 else weights @ rows / weights.sum()
        return action

    def reset(self) -> None:
        """A new episode: nothing of the old one is executed, whenever it arrives."""
        self.episode += 1
        self.executed = self.starved = self._asked = 0
        self.joins, self._chunks = [], []

    def _alive(self) -> list[_Chunk]:
        return [chunk for chunk in self._chunks if chunk.end > self.executed]

    def _blended(self, fresh: _Chunk) -> _Chunk:
        late = fresh.actions[self.executed - fresh.start :]
        old = [chunk.actions[self.executed - chunk.start :] for chunk in self._alive()]
        shared = min(self.blend, len(late), len(old[0]) if old else 0)
        if not shared:
            return fresh
        weight = np.arange(1, shared + 1, dtype=np.float32)[:, None] / (shared + 1)
        soft = old[0][:shared] + weight * (late[:shared] - old[0][:shared])
        return _Chunk(self.executed, np.concatenate([soft, late[shared:]]))


def seam(actions: np.ndarray, joins: list[int], blend: int = 0) -> float | None:
    """Largest step where chunks change over the largest inside a chunk: actions [T, dim]; None without both.

    The change lasts `blend` steps more than one.
    """
    steps = np.abs(np.diff(actions, axis=0)).max(axis=1)
    at = np.zeros(len(steps), bool)
    for join in joins:
        at[max(join - 1, 0) : join + blend] = join > 0
    if not at.any() or at.all() or steps[~at].max() == 0:
        return None
    return float(steps[at].max() / steps[~at].max())
