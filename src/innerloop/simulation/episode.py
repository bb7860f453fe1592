"""One episode: a world, a policy, an executor, and the latency between them, in simulated time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from innerloop.contract import Previous
from innerloop.execute import Executor, Ticket
from innerloop.execute.executor import seam
from innerloop.simulation.world import RATE, World

LIMIT = 200  # control ticks, waiting included: 5 s


class Answer(Protocol):
    """A policy's chunk; innerloop.Chunk is one."""

    @property
    def actions(self) -> np.ndarray: ...
    @property
    def timing(self) -> dict[str, float]: ...


Infer = Callable[..., Answer]  # (observation, seed=, previous=)


@dataclass(frozen=True)
class Latency:
    """What every answer takes, in milliseconds: delay, and up to jitter more, evenly spread."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def draw(self, generator: np.random.Generator) -> float:
        """Seconds of one answer."""
        return (self.delay_ms + self.jitter_ms * float(generator.random())) / 1e3


@dataclass(frozen=True)
class Outcome:
    """ticks: of control until success or the limit. waited: ticks without an action. seam: see execute.executor.seam."""

    task: str
    seed: int
    success: bool
    ticks: int
    decisions: int
    waited: int
    seam: float | None
    timing: list[dict[str, float]] = field(default_factory=list)  # of each decision


@dataclass(frozen=True)
class _Flight:
    arrival: int  # tick
    answer: Answer
    ticket: Ticket
    seconds: float


def run(
    world: World,
    infer: Infer,
    executor: Executor,
    seed: int,
    latency: Latency = Latency(),
    watch: Callable[[World, int], Any] | None = None,
) -> Outcome:
    """Until success or LIMIT ticks. The seed fixes the episode, the solver's noise and the jitter; watch sees each tick."""
    generator = np.random.default_rng(seed)
    world.reset(seed)
    executor.reset()
    flight: _Flight | None = None
    executed: list[np.ndarray] = []
    timing: list[dict[str, float]] = []
    last, done, tick = np.zeros(4, np.float32), False, 0
    while tick < LIMIT and not done:
        flight = _landed(flight, executor, tick)
        if flight is None and executor.due():
            ticket, seconds = executor.ticket(), latency.draw(generator)
            answer = infer(world.observe(), seed=1000 * seed + len(timing), previous=_previous(ticket))
            timing.append(answer.timing)
            arrival = tick + executor.delay.of(seconds)
            flight = _landed(_Flight(arrival, answer, ticket, seconds), executor, tick)
        action = executor.next()
        if action is not None:
            executed.append(action)
        last = world.hold(last) if action is None else action
        done = world.step(last)
        tick += 1
        if watch is not None:
            watch(world, tick)
    hops = seam(np.stack(executed)[:, :3], executor.joins, executor.blend) if executed else None
    return Outcome(world.task, seed, done, tick, len(timing), executor.starved, hops, timing)


def executor(mode: Any, execute: int | None) -> Executor:
    """An executor at the world's rate."""
    return Executor(RATE, mode, execute)


def _landed(flight: _Flight | None, executor: Executor, tick: int) -> _Flight | None:
    if flight is None or flight.arrival > tick:
        return flight
    executor.answer(flight.answer.actions, flight.ticket, flight.seconds)
    return None


def _previous(ticket: Ticket) -> Previous | None:
    left = ticket.continues
    return None if left is None else Previous(left, ticket.delay, schedule=ticket.schedule)
