"""A policy's inference as plain data: buffers, stages, and the rules they obey."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from innerloop.contract.buffer import Buffer, Role
from innerloop.contract.errors import PlanError
from innerloop.contract.stage import Stage

CLOCKS = ("checkpoint", "prompt", "observation", "step")  # slowest first


@dataclass(frozen=True)
class Plan:
    """Stages in run order over buffers by name. Construction refuses a broken plan.

    `ticks` says which clock drives each input buffer; every other clock is derived: a buffer ticks
    as often as the fastest input that reaches it, and a stage as often as the fastest buffer it reads.
    """

    name: str
    buffers: Mapping[str, Buffer]
    stages: tuple[Stage, ...]
    ticks: Mapping[str, str]
    fingerprint: str = ""
    _clocks: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_edges()
        object.__setattr__(self, "_clocks", self._derive_clocks())

    def clock(self, stage: str) -> str:
        """The clock of a stage: checkpoint, prompt, observation or step."""
        return self._clocks[stage]

    def answers(self, stage: str) -> bool:
        """Whether a stage writes an output."""
        found = next(s for s in self.stages if s.name == stage)
        return any(self.buffers[name].role is Role.OUTPUT for name in found.writes)

    def by_role(self, role: Role) -> list[Buffer]:
        """Buffers of one role, in plan order."""
        return [b for b in self.buffers.values() if b.role is role]

    def readers(self, buffer: str) -> list[str]:
        """Names of the stages that read a buffer."""
        return [s.name for s in self.stages if buffer in s.reads]

    def manifest(self, addresses: Mapping[str, int] | None = None) -> dict[str, Any]:
        """JSON-able description: all a host in another language needs."""
        writer = self._writers()
        return {
            "schema": 1,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "buffers": [
                {
                    "name": b.name,
                    "shape": list(b.shape),
                    "dtype": str(b.dtype).removeprefix("torch."),
                    "role": b.role.value,
                    "bytes": b.bytes,
                    "address": None if addresses is None else addresses[b.name],
                    "clock": self.ticks.get(b.name),
                }
                for b in self.buffers.values()
            ],
            "stages": [
                {
                    "name": s.name,
                    "clock": self.clock(s.name),
                    "prepare": s.prepare,
                    "reads": list(s.reads),
                    "writes": list(s.writes),
                }
                for s in self.stages
            ],
            "edges": [
                {"from": writer[r], "to": s.name, "buffer": r} for s in self.stages for r in s.reads if r in writer
            ],
        }

    def _writers(self) -> dict[str, str]:
        return {w: s.name for s in self.stages for w in s.writes}

    def _check_names(self) -> None:
        for key, buffer in self.buffers.items():
            if key != buffer.name:
                raise PlanError(f"plan {self.name}: buffer '{buffer.name}' is filed under the name '{key}'")
        names = [s.name for s in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"plan {self.name}: two stages are named '{name}'")
            if name in self.buffers:
                raise PlanError(f"plan {self.name}: '{name}' names both a stage and a buffer")
        for name, tick in self.ticks.items():
            if tick not in CLOCKS:
                raise PlanError(f"plan {self.name}: input '{name}' ticks on '{tick}', not one of {CLOCKS}")
            if name not in self.buffers or self.buffers[name].role is not Role.INPUT:
                raise PlanError(f"plan {self.name}: '{name}' has a clock but is not an input buffer")

    def _check_edges(self) -> None:
        written: dict[str, str] = {}
        all_writers = self._writers()
        for stage in self.stages:
            for name in (*stage.reads, *stage.writes):
                if name not in self.buffers:
                    raise PlanError(f"stage '{stage.name}': buffer '{name}' is not declared in plan {self.name}")
            for name in stage.reads:
                self._check_read(stage, name, written, all_writers)
            for name in stage.writes:
                if self.buffers[name].role is Role.INPUT:
                    raise PlanError(f"stage '{stage.name}' writes '{name}', an input that only the host writes")
                if name in written:
                    raise PlanError(f"buffer '{name}' has two writers: '{written[name]}' and '{stage.name}'")
                written[name] = stage.name
        for buffer in self.buffers.values():
            if buffer.role is Role.INPUT and buffer.name not in self.ticks:
                raise PlanError(f"plan {self.name}: input '{buffer.name}' has no clock")
            if buffer.role is Role.OUTPUT and buffer.name not in written:
                raise PlanError(f"plan {self.name}: output '{buffer.name}' is written by no stage")

    def _check_read(self, stage: Stage, name: str, written: Mapping[str, str], all_writers: Mapping[str, str]) -> None:
        if self.buffers[name].role is Role.INPUT or name in written:
            return
        if name in stage.writes:
            raise PlanError(f"stage '{stage.name}' reads '{name}' before it writes it: a cycle of one")
        if name in all_writers:
            raise PlanError(
                f"stage '{stage.name}' reads '{name}', which '{all_writers[name]}' writes later: a cycle or a wrong order"
            )
        raise PlanError(f"stage '{stage.name}' reads '{name}', which no stage writes and which is not an input")

    def _derive_clocks(self) -> dict[str, str]:
        rank = {name: CLOCKS.index(tick) for name, tick in self.ticks.items()}
        clocks: dict[str, str] = {}
        for stage in self.stages:
            fastest = max((rank.get(name, 0) for name in stage.reads), default=0)
            clocks[stage.name] = CLOCKS[fastest]
            for name in stage.writes:
                rank[name] = fastest
        return clocks


def same_buffers(plans: Sequence[Plan]) -> Mapping[str, Buffer]:
    """The buffers that all plans share. Raises PlanError where one name has two meanings."""
    first = plans[0].buffers
    for plan in plans[1:]:
        for name in {*first, *plan.buffers}:
            if first.get(name) != plan.buffers.get(name):
                raise PlanError(f"plans {plans[0].name} and {plan.name} disagree about buffer '{name}'")
    return first
