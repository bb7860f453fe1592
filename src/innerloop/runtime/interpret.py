"""Runs a plan eagerly on any device and checks that each stage touches only what it declares."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from innerloop.contract.errors import PlanError
from innerloop.contract.plan import Plan
from innerloop.contract.stage import Stage
from innerloop.runtime.arena import Arena, integrity_word
from innerloop.runtime.refresh import CHANGED, Refresh
from innerloop.runtime.windows import Value, write_window


class Interpreter:
    """The reference for everything captured: versions, selective refresh, eager stages.

    With `check` a stage that reads, writes or resizes what it does not declare raises PlanError.
    """

    def __init__(self, plans: Plan | Sequence[Plan], arena: Arena, check: bool = True) -> None:
        self.plans: tuple[Plan, ...] = (plans,) if isinstance(plans, Plan) else tuple(plans)
        self.arena = arena
        self.check = check
        self._refresh = Refresh(self.plans, arena.layout, merge=False, prepared=True)
        self._ledger = self._refresh.ledger()

    def write(self, name: str, value: Value | torch.Tensor) -> None:
        """Copies a value into an input window and bumps its version; rows may be shorter than the window's."""
        write_window(self.arena, name, value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
        index = self._refresh.index[name]
        self._ledger.versions[index] = self._refresh.present[index] = self._refresh.fresh()

    def read(self, name: str) -> torch.Tensor:
        """A copy of a buffer, on its device."""
        return self.arena.tensors[name].clone()

    def version(self, name: str) -> int:
        """The number of a buffer's present content; 0 before its first write."""
        return self._ledger.versions[self._refresh.index[name]]

    def run(self, plan: Plan | None = None, skip: bool = True) -> list[str]:
        """Runs the stages that are due (all of them without `skip`) and returns their names in order."""
        refresh, ledger = self._refresh, self._ledger
        steps = refresh.steps[0 if plan is None else self._position(plan)]
        due = refresh.due(steps, ledger) if skip else [(step, CHANGED) for step in steps]
        for step, mark in due:
            refresh.begin(step)
            execute(step.stages[0], self.arena, self.check)
            refresh.commit(step, mark, ledger)
        return [step.names[0] for step, _ in due]

    def _position(self, plan: Plan) -> int:
        for at, known in enumerate(self.plans):
            if known is plan:
                return at
        raise PlanError(f"plan {plan.name} is not one of this interpreter's plans")


class Declared(Mapping[str, torch.Tensor]):
    """The tensors that a stage declares; any other name raises PlanError."""

    def __init__(self, stage: Stage, tensors: Mapping[str, torch.Tensor]) -> None:
        self._stage = stage.name
        self._tensors = {name: tensors[name] for name in (*stage.reads, *stage.writes)}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise PlanError(f"stage '{self._stage}' touches '{name}' without declaring it: add it to reads or writes")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def execute(stage: Stage, arena: Arena, check: bool) -> None:
    """Runs one stage eagerly over the arena. Raises PlanError when checking finds an undeclared access."""
    declared = Declared(stage, arena.tensors)
    with torch.inference_mode(False), torch.no_grad():
        if not check:
            stage.run(declared)
            return
        counters = {name: tensor._version for name, tensor in arena.tensors.items()}
        words = _words_outside(stage, arena)
        stage.run(declared)
        _check_counters(stage, arena, counters)
        _check_words(stage, arena, words)
        _check_addresses(stage, arena)


def _words_outside(stage: Stage, arena: Arena) -> dict[str, torch.Tensor]:
    # kernels that write through a pointer leave no trace in the counters, but they do in the bytes
    written = {other for name in stage.writes for other in (name, *arena.layout.sharing(name))}
    return {name: integrity_word(arena.bytes_of(name)) for name in arena.tensors if name not in written}


def _complain(stage: Stage, name: str) -> PlanError:
    if name in stage.reads:
        return PlanError(f"stage '{stage.name}' modifies '{name}', which it only reads: declare a buffer to write")
    return PlanError(f"stage '{stage.name}' writes '{name}' without declaring it: add it to its writes")


def _check_counters(stage: Stage, arena: Arena, before: Mapping[str, int]) -> None:
    for name, tensor in arena.tensors.items():
        if name not in stage.writes and tensor._version != before[name]:
            raise _complain(stage, name)


def _check_words(stage: Stage, arena: Arena, before: Mapping[str, torch.Tensor]) -> None:
    for name, word in before.items():
        if not torch.equal(word, integrity_word(arena.bytes_of(name))):
            raise _complain(stage, name)


def _check_addresses(stage: Stage, arena: Arena) -> None:
    for name in (*stage.reads, *stage.writes):
        tensor, buffer = arena.tensors[name], arena.layout.buffers[name]
        if tensor.data_ptr() != arena.addresses[name] or tuple(tensor.shape) != buffer.shape:
            raise PlanError(f"stage '{stage.name}' moves or resizes '{name}': write into it in place")
