"""What is due: versions of buffers, and which steps must run for a decision.

Every distinct content has a number of its own. `Ledger.versions` says which content a session means,
`present` which content the arena holds; a step is due when what it read has changed since it ran, or
when a value that a due step reads has been overwritten.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from innerloop.contract.buffer import Role
from innerloop.contract.plan import Plan
from innerloop.contract.stage import Stage
from innerloop.runtime.layout import Layout, sources

NOTHING = -1  # the arena holds no content of this buffer
CHANGED, LOST = 1, 2
SMALL = 16384  # bytes; neighbouring inputs up to this size travel in one copy, which costs what a tiny one costs


@dataclass(frozen=True)
class Step:
    """Stages that run as one, over buffers by index."""

    key: int  # which program runs it; equal in two plans for the same stages
    stages: tuple[Stage, ...] = field(repr=False)
    names: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    spoils: tuple[int, ...]  # buffers that share bytes with a written one
    touched: Callable[[Sequence[int]], tuple[int, ...]] = field(repr=False)  # versions -> those of reads and writes


class Ledger:
    """What one session believes: the content of each buffer, and what each step saw when it last ran."""

    __slots__ = ("ran", "versions")

    def __init__(self, versions: Sequence[int], ran: Sequence[tuple[int, ...] | None]) -> None:
        self.versions = list(versions)
        self.ran = list(ran)

    def copy(self) -> "Ledger":
        """An independent ledger that means the same contents."""
        return Ledger(self.versions, self.ran)


class Refresh:
    """The prepared table of some plans over one arena, and the content the arena holds.

    `merge` makes one step of neighbouring stages that are always due together, up to those that write outputs; `prepared`
    keeps prepare stages in.
    """

    def __init__(self, plans: Sequence[Plan], layout: Layout, merge: bool, prepared: bool) -> None:
        self.names = tuple(layout.buffers)
        self.index = {name: i for i, name in enumerate(self.names)}
        roles = [layout.buffers[name].role for name in self.names]
        self.inputs = tuple(i for i, role in enumerate(roles) if role is Role.INPUT)
        self.outputs = tuple(i for i, role in enumerate(roles) if role is Role.OUTPUT)
        self.owned = tuple(i for i, name in enumerate(self.names) if layout.places[name][0] == Role.STATE.value)
        self.present = [NOTHING] * len(self.names)
        self._fresh: Iterator[int] = itertools.count(1)
        self._keys: dict[tuple[int, ...], int] = {}
        self.steps = tuple(self._steps(plan, layout, merge, prepared) for plan in plans)
        self.first = self._first(plans, {name for name in self.names if layout.buffers[name].bytes > SMALL})
        self.first_inputs = frozenset(self.inputs).intersection(i for step in self.first for i in step.reads)
        if not prepared:
            self._mark_prepared(plans)

    @property
    def programs(self) -> tuple[Step, ...]:
        """One step for each key, in key order."""
        by_key = {step.key: step for steps in self.steps for step in steps}
        return tuple(by_key[key] for key in sorted(by_key))

    def ledger(self) -> Ledger:
        """Of a session that has seen nothing."""
        return Ledger([0] * len(self.names), [None] * len(self._keys))

    def fresh(self) -> int:
        """The number of a content never seen before."""
        return next(self._fresh)

    def due(self, steps: Sequence[Step], ledger: Ledger) -> list[tuple[Step, int]]:
        """The steps to run, in order, each with CHANGED (new contents) or LOST (the same contents again)."""
        versions, ran, present = ledger.versions, ledger.ran, self.present
        marks = [0] * len(steps)
        changed: set[int] = set()
        for at, step in enumerate(steps):
            if ran[step.key] != step.touched(versions) or not changed.isdisjoint(step.reads):
                marks[at] = CHANGED
                changed.update(step.writes)
        lost = {i for i in self.outputs if present[i] != versions[i]}
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            if not marks[at] and not lost.isdisjoint(step.writes):
                marks[at] = LOST
            if marks[at]:
                lost.update(i for i in step.reads if present[i] != versions[i])
        return [(step, mark) for step, mark in zip(steps, marks, strict=True) if mark]

    def begin(self, step: Step) -> None:
        """Before a step runs: what it will overwrite is gone, even if it fails."""
        for i in step.writes:
            self.present[i] = NOTHING
        for i in step.spoils:
            self.present[i] = NOTHING

    def commit(self, step: Step, mark: int, ledger: Ledger) -> None:
        """After a step ran for a session."""
        versions = ledger.versions
        for i in step.writes:
            if mark == CHANGED:
                versions[i] = next(self._fresh)
            self.present[i] = versions[i]
        ledger.ran[step.key] = step.touched(versions)

    def forget(self) -> None:
        """The arena holds nothing that a session may rely on."""
        for i in range(len(self.present)):
            if i not in self._constant:
                self.present[i] = NOTHING

    def _first(self, plans: Sequence[Plan], large: set[str]) -> tuple[Step, ...]:
        """Steps of every plan that large inputs reach and nothing but an observation, with what these need: the device
        can have them before the rest is known.
        """
        reach = sources(plans[0])
        seen = {name for name, tick in plans[0].ticks.items() if tick == "observation"}
        wanted = [reach[step.names[0]] for step in self.steps[0]]
        known = frozenset().union(*(names for names in wanted if names <= seen and names & large))
        first = [step for step, names in zip(self.steps[0], wanted, strict=True) if names and names <= known]
        while not all(_may_lead(first, steps) for steps in self.steps):
            first.pop()
        return tuple(first)

    _constant: frozenset[int] = frozenset()

    def _mark_prepared(self, plans: Sequence[Plan]) -> None:
        # what prepare stages write is the same for every session: version 0, always there
        names = {name for plan in plans for stage in plan.stages if stage.prepare for name in stage.writes}
        self._constant = frozenset(self.index[name] for name in names)
        for i in self._constant:
            self.present[i] = 0

    def _steps(self, plan: Plan, layout: Layout, merge: bool, prepared: bool) -> tuple[Step, ...]:
        reach = sources(plan)
        stages = [stage for stage in plan.stages if prepared or not stage.prepare]
        groups: list[list[Stage]] = []
        for stage in stages:
            together = bool(groups) and reach[groups[-1][-1].name] == reach[stage.name]
            if merge and together and not plan.answers(stage.name):  # what each takes is told apart
                groups[-1].append(stage)
            else:
                groups.append([stage])
        return tuple(self._step(group, layout) for group in groups)

    def _step(self, group: Sequence[Stage], layout: Layout) -> Step:
        written = [name for stage in group for name in stage.writes]
        read = [name for name in dict.fromkeys(n for stage in group for n in stage.reads) if name not in written]
        spoils = {other for name in written for other in layout.sharing(name)} - set(written)
        reads, writes = (tuple(self.index[name] for name in names) for names in (read, written))
        touches = reads + writes
        return Step(
            key=self._keys.setdefault(tuple(id(stage) for stage in group), len(self._keys)),
            stages=tuple(group),
            names=tuple(stage.name for stage in group),
            reads=reads,
            writes=writes,
            spoils=tuple(self.index[name] for name in spoils),
            touched=_getter(touches),
        )


def _may_lead(first: Sequence[Step], steps: Sequence[Step]) -> bool:
    """Whether these steps, in their order, may run before all others of a plan: they share no byte with what those
    before them read or write.
    """
    keys = [step.key for step in steps]
    for step in first:
        if step.key not in keys:
            return False
        mine = {*step.writes, *step.spoils}
        before = (other for other in steps[: keys.index(step.key)] if other not in first)
        if not all(mine.isdisjoint((*other.reads, *other.writes)) for other in before):
            return False
    return True


def _getter(touches: tuple[int, ...]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if len(touches) > 1:
        return operator.itemgetter(*touches)
    return lambda versions: tuple(versions[i] for i in touches)
