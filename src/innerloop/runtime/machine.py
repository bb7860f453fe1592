"""Plans made ready on a device: buffers, graphs, sessions, decisions."""

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from innerloop.contract.errors import ObservationError, PlanError
from innerloop.contract.plan import Plan
from innerloop.runtime import capsule as capsules
from innerloop.runtime import export as exports
from innerloop.runtime.arena import Arena
from innerloop.runtime.capture import Programs, capture, eager
from innerloop.runtime.executor import Ending, owner
from innerloop.runtime.interpret import execute
from innerloop.runtime.profile import ProfiledTick
from innerloop.runtime.refresh import Refresh, Step
from innerloop.runtime.session import Session, SessionError, Sessions
from innerloop.runtime.tick import Tick
from innerloop.runtime.windows import Value, Windows

T = TypeVar("T")
Inputs = Mapping[str, Value]
_Answer = tuple[tuple[str, ...], dict[str, np.ndarray], dict[str, float]]  # stages, outputs, milliseconds


@dataclass(frozen=True)
class Decision:
    """outputs by name; the stages that ran, in order; milliseconds: `run`, and by program when profiled."""

    outputs: dict[str, np.ndarray]
    stages: tuple[str, ...]
    timing: dict[str, float]


class Machine:
    """Plans by prompt capacity, over the same buffers, on one device. Every method may be called from any thread.

    Stages run in the context (choice of kernels) that the machine was made in. On CUDA every program is captured and
    checked against the interpreter before this returns; `capture=False` runs them eagerly. samples: inputs by capacity
    to warm up and check with. sessions: how many may be open; resident: how many keep their state on the device.
    """

    def __init__(
        self,
        plans: Mapping[int, Plan],
        device: torch.device | str = "cpu",
        *,
        capture: bool = True,
        samples: Mapping[int, Inputs] | None = None,
        sessions: int = 64,
        resident: int = 8,
    ) -> None:
        if not plans:
            raise PlanError("a machine needs at least one plan")
        self.plans = dict(sorted(plans.items()))
        self.ready = False
        self.captures = 0  # graphs captured so far; stays as it is once `ready`
        self.weights_version = 0
        self.seconds: dict[str, float] = {}  # of each part of getting ready
        self._list = list(self.plans.values())
        self._fingerprint = self._list[0].fingerprint
        self._thread = owner(torch.device(device))
        self._context = contextvars.copy_context()
        self._lent = False
        self._begun = False  # a decision whose end is not yet left to whoever waits
        self._thread.call(lambda: self._context.run(self._make, capture, samples, sessions, resident))

    @property
    def agreement(self) -> Mapping[str, float]:
        """Largest difference between replay and interpreter found before `ready`, by program; 0 means equal bits."""
        return self._programs.agreement

    def decide(
        self, session: str | Session, inputs: Inputs | Sequence[Inputs], capacity: int, profile: bool = False
    ) -> Decision:
        """Copies in what changed, runs what is due at a capacity, and reads the outputs.

        inputs: of one robot, or one mapping for each row of the batch; names left out keep the session's last value.
        The outputs of one robot at batch 1 come without the batch axis. Raises ObservationError for a bad input.
        """
        self._steps(capacity)  # before anything changes
        if isinstance(inputs, Mapping):
            return self.decide_while(session, inputs, lambda: ({}, capacity), profile)
        return self._decide(session, stack(inputs), lambda: ({}, capacity), profile)

    def decide_while(
        self, session: str | Session, first: Inputs, rest: Callable[[], tuple[Inputs, int]], profile: bool = False
    ) -> Decision:
        """`decide` for one robot, whose device sets to work on what images alone reach while the host prepares the rest.

        first: the inputs known at once; rest: called with the device at work, gives the others and the capacity. What it
        raises is raised here; the session then keeps `first`.
        """
        found = self._decide(session, first, rest, profile)
        one = {name: value[0] if value.shape[:1] == (1,) else value for name, value in found.outputs.items()}
        return Decision(one, found.stages, found.timing)

    def _decide(
        self, session: str | Session, first: Inputs, rest: Callable[[], tuple[Inputs, int]], profile: bool
    ) -> Decision:
        """Outputs with their batch axis."""
        began = time.perf_counter()
        target = self.session(session) if isinstance(session, str) else session
        tick = self._profiled if profile else self._tick
        steps: Sequence[Step] = ()

        def told() -> tuple[Inputs, Sequence[Step]]:
            nonlocal steps
            more, capacity = rest()
            steps = self._steps(capacity)
            return more, steps

        def start() -> Ending[_Answer]:
            self._refuse_if_lent()
            self._settle()
            self._sessions.hold(target)
            due = tick.decide(first, told, target.ledger, target.kept)
            ran = {step.key for step, _ in due}
            names = tuple(name for step in steps if step.key in ran for name in step.names)
            windows, read = self._windows, self._profiled.read if profile else dict
            ending = self._thread.leave(windows.wait, lambda: (names, windows.outputs(), read()))
            self._begun = False
            return ending

        # Graphs run alike on any thread; eager stages would see the calling thread's modes of torch.
        turn = self._thread.here if self._programs.graphs else self._thread.call
        target.asked()
        try:
            names, outputs, timing = self._thread.end(turn(lambda: self._context.run(start)))
        finally:
            target.answered()
        return Decision(outputs, names, {"run": 1e3 * (time.perf_counter() - began), **timing})

    def session(self, name: str) -> Session:
        """The session of this name, opened if need be. Raises SessionError at the limit."""
        if not self.ready:
            raise SessionError("the machine is closed: load the policy again")
        return self._sessions.get(name)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of the open sessions."""
        return tuple(self._sessions.open)

    def expire(self, seconds: float) -> list[str]:
        """Ends the sessions that have decided nothing for so long and returns their names."""
        before = time.monotonic() - seconds
        idle = [s for s in list(self._sessions.open.values()) if s.used < before and not s.in_flight]
        for session in idle:
            session.end()
        return [session.name for session in idle]

    def load_capsule(self, path: str | Path) -> capsules.Capsule:
        """A capsule from a file. Raises CapsuleError if it is damaged or of another policy."""
        return self._thread.call(
            lambda: capsules.read_file(Path(path), self._sessions.fingerprint, self._sessions.home)
        )

    def weights_changed(self, update: Callable[[], None] | None = None, fingerprint: str | None = None) -> None:
        """Runs `update` between two decisions and prepares again; no decision sees half of it.

        Weights must change in place. Every stage of every session becomes due, and older capsules are refused.
        """

        def change() -> None:
            self._refuse_if_lent()
            self._sessions.release()
            self.weights_version += 1
            name = f"{self._fingerprint}+{self.weights_version}"
            try:
                if update is not None:
                    update()
                name = fingerprint or name
            finally:  # after a failure too: some weights may have changed
                self._fingerprint = name
                self._sessions.rename(name)
                self._prepare()
                self._sessions.forget_runs()

        self._thread.call(lambda: self._context.run(change))

    def export(self) -> exports.Export:
        """Lends buffers and graphs to a host that drives them itself; decisions are refused until it closes."""

        def lend() -> exports.Export:
            self._refuse_if_lent()
            self._sessions.release()
            self._thread.settle()
            self._lent = True
            names = self._programs.names
            described = exports.manifest(self.plans, self._arena, self._refresh, self._programs, self._fingerprint)
            captured = {name: graph.replay for name, graph in self._programs.graphs.items()}
            graphs = captured or dict(zip(names, self._programs.run, strict=True))
            return exports.Export(described, dict(self._arena.tensors), graphs, self._take_back)

        return self._thread.call(lend)

    def on_device(self, function: Callable[[], T]) -> T:
        """Runs a function between two decisions on the thread that owns the device, and returns its answer."""
        return self._thread.call(function)

    def account(self) -> dict[str, int]:
        """Bytes: buffers by region, and copies of sessions' and capsules' state on the device and in host memory."""
        pool = {f"saved_{name}": size for name, size in self._sessions.home.pool.account().items()}
        return {**self._arena.account(), **pool}

    def close(self) -> None:
        """Ends every session and frees graphs and buffers; the machine cannot be used afterwards."""

        def free() -> None:
            self.ready = False
            for session in list(self._sessions.open.values()):
                self._sessions.end(session)
            del self._programs, self._tick, self._profiled, self._windows, self._arena

        if self.ready:
            self._thread.call(free)

    def _make(self, captured: bool, samples: Mapping[int, Inputs] | None, sessions: int, resident: int) -> None:
        self._thread.settle()  # the caller wrote the weights on a stream of its own
        clock = [time.perf_counter()]
        self._arena = Arena(self._list, self._thread.device)
        self._refresh = Refresh(self._list, self._arena.layout, merge=True, prepared=False)
        self._windows = Windows(self._arena, self._refresh, self._thread.opened())
        clock.append(time.perf_counter())
        self._prepare()
        clock.append(time.perf_counter())
        self.seconds = dict(zip(("arena", "prepare"), np.diff(clock).tolist(), strict=True))
        self._programs = self._program(captured, samples)
        self.seconds |= self._programs.seconds
        self._tick = Tick(self._refresh, self._windows, self._programs.run)
        self._profiled = ProfiledTick(self._refresh, self._windows, self._programs.run, self._programs.names)
        self._sessions = Sessions(self._arena, self._refresh, self._windows, self._thread, sessions, resident)
        self._sessions.rename(self._fingerprint)
        self.ready = True

    def _program(self, captured: bool, samples: Mapping[int, Inputs] | None) -> Programs:
        if self._thread.device.type != "cuda" or not captured:
            return eager(self._refresh, self._list, self._arena)
        given = None if samples is None else [samples[capacity] for capacity in self.plans]
        programs = capture(self._refresh, self._list, self._arena, given)
        self.captures = len(programs.graphs)
        return programs

    def _prepare(self) -> None:
        stages = {id(stage): stage for plan in self._list for stage in plan.stages if stage.prepare}
        for stage in stages.values():
            execute(stage, self._arena, check=False)

    def _steps(self, capacity: int) -> Sequence[Step]:
        if capacity not in self.plans:
            raise ObservationError(f"no plan has the prompt capacity {capacity}; there are {list(self.plans)}")
        return self._refresh.steps[list(self.plans).index(capacity)]

    def _settle(self) -> None:
        """Before a decision: what an interrupted one has started is waited for, since staging must not change under it."""
        if self._begun:
            self._windows.mark()
            self._windows.wait()
        self._begun = True

    def _refuse_if_lent(self) -> None:
        if not self.ready:
            raise SessionError("the machine is closed: load the policy again")
        if self._lent:
            raise SessionError("the buffers are lent to another host: close its export first")

    def _take_back(self) -> None:
        def back() -> None:
            self._thread.settle()
            self._lent = False
            self._refresh.forget()
            self._prepare()  # the host may have written there too

        self._thread.call(lambda: self._context.run(back))


def stack(rows: Sequence[Inputs]) -> dict[str, Value]:
    """One mapping for each robot -> one for the batch. Raises ObservationError when they give different inputs."""
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ObservationError("every row of a batch must give the same inputs")
    return {name: _stacked([row[name] for row in rows]) for name in rows[0]}


def _stacked(values: Sequence[Value]) -> Value:
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if len(arrays) == len(values):
        return np.stack(arrays)
    return [row for value in values for row in value]
