"""Our own plan in plain torch with torch.compile on each stage: what one line of effort gives."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from innerloop.blocks import dit_head, flow, flow_plan
from innerloop.blocks.dit import DiT
from innerloop.contract import InnerloopError, Stage
from innerloop.contract.stage import Tensors
from innerloop.engine import LoadedPolicy
from innerloop.kernels import Kernels, select
from innerloop.kernels.euler import Guide
from innerloop.measure.interpreted import Interpreted
from innerloop.runtime.arena import Arena
from innerloop.runtime.layout import aligned

log = logging.getLogger(__name__)


class CompiledPolicy:
    """A policy loaded with kernels="reference" through torch.compile in its default mode, each stage one graph.

    The stage `resize` stays as it is. Where a stage loops, over solver steps or tokens of an answer, the graph is what it
    repeats (docs/LOG.md has why). Compiles at the first decision. Raises InnerloopError where torch.compile does not work.
    """

    name = "torch-compile"

    def __init__(self, policy: LoadedPolicy) -> None:
        device = policy.placement.device
        _check_compiler(device)
        self.policy = policy
        self._made: dict[Stage, Stage] = {}
        self._repeated = _repeated(policy)
        if self._repeated is not None:
            owner, attribute = self._repeated
            self._turn = _Turn(getattr(owner, attribute), device)
        # the extent of a resize's sums is data: our kernel does it here too
        self._left = {"resize"} | ({"action"} if self._repeated is not None else set())
        self._interpreted = Interpreted(policy, self._compiled, _Apart)
        run = [stage for stage in next(iter(policy.plans.values())).stages if not stage.prepare]
        stages = [stage.name for stage in run if stage.name != "resize"]
        log.info(
            "%s: %d stages of %s (%s) for %s are compiled at the first decision; at full size that takes minutes",
            self.name, len(stages), policy.family.name, ", ".join(stages), device,
        )  # fmt: skip

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim]; the whole call, un-normalisation included."""
        with _traceable():
            if self._repeated is None:
                return self._interpreted.infer(observation, noise)
            step = mock.patch.object(flow, "at_step", self._turn.at_step)
            with step, mock.patch.object(*self._repeated, self._turn):
                return self._interpreted.infer(observation, noise)

    def _compiled(self, stage: Stage) -> Stage:
        if stage.prepare or stage.name in self._left:
            return stage
        if stage not in self._made:
            run, names = _Compiled(stage.name, stage.run), (*stage.reads, *stage.writes)

            def call(tensors: Tensors) -> None:
                run({name: tensors[name] for name in names})

            self._made[stage] = replace(stage, run=call)
        return self._made[stage]


class _Apart(Arena):
    """A tensor of its own for every buffer, as torch code has them; no regions, so scratch shares nothing.

    In a region torch.compile takes buffers of different item sizes for overlapping: it compares offsets counted in
    items, and refuses to write to one of them.
    """

    def account(self) -> dict[str, int]:
        """`total` bytes."""
        return {"total": sum(aligned(buffer.bytes) for buffer in self.layout.buffers.values())}

    def bytes_of(self, name: str) -> torch.Tensor:
        """A buffer's bytes, without padding."""
        return self.tensors[name].view(-1).view(torch.uint8)

    def _region(self, size: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    def _tensor(self, name: str) -> torch.Tensor:
        buffer = self.layout.buffers[name]
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=self.device)


class _Compiled:
    """A function as one graph; says how long its first call took."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._ready, self._function = name, False, torch.compile(function, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        if self._ready:
            return self._function(*arguments)
        started = time.perf_counter()
        result = self._function(*arguments)
        self._ready = True
        log.info("%s: %s, %.1f s", CompiledPolicy.name, self._name, time.perf_counter() - started)
        return result


class _Turn(_Compiled):
    """What the action stage repeats, compiled once for all steps of pi0 and pi0.5.

    torch.compile would compile again for another number (a step's gain and time) or stride (of a step's rows in its
    table, which is final before the first step): numbers go in as tensors, rows as contiguous copies, made once.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        super().__init__("one turn of the action stage's loop", function)
        self._device = device
        self._numbers: dict[float, torch.Tensor] = {}
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, *arguments: Any) -> Any:
        if isinstance(arguments[-1], Guide):
            guide = arguments[-1]
            held: Any = {"gain": self._number(guide.gain), "time": self._number(guide.time)}
            arguments = (*arguments[:-1], guide._replace(**held))
        return super().__call__(*arguments)

    def at_step(self, table: torch.Tensor, step: int) -> torch.Tensor:
        """Stands for flow.at_step."""
        key = table.data_ptr(), step
        if key not in self._rows:
            self._rows[key] = torch.stack((table[step], table[-1]))
        return self._rows[key]

    def _number(self, value: float) -> torch.Tensor:
        if value not in self._numbers:
            self._numbers[value] = torch.tensor(value, dtype=torch.float64, device=self._device)
        return self._numbers[value]


def _repeated(policy: LoadedPolicy) -> tuple[Any, str] | None:
    """Owner and name of the function that the action stage calls in a loop; None where it does not loop."""
    model: Any = policy.model
    if any(isinstance(part, DiT) for part in model.modules()):
        return dit_head, "step"
    if hasattr(model, "vocabulary"):
        return model.backbone.language, "forward"
    return (model, "denoise") if hasattr(model, "denoise") else None


class _Reference:
    """Stands for the context variable that holds the choice of kernels; there is no other choice."""

    def get(self) -> Kernels:
        return "reference"

    def set(self, kind: Kernels) -> None:
        assert kind == "reference"

    def reset(self, token: None) -> None: ...


_REFERENCE = _Reference()  # one, for what is compiled checks that it is still the same


@contextmanager
def _traceable() -> Iterator[None]:
    """Within it stages look up no context variable, which torch.compile cannot trace, and copy no complex words.

    Complex words are how flow_plan copies faster in eager torch; torch.compile generates no code for them.
    """
    kernels = mock.patch.object(select, "_selected", _REFERENCE)
    words = mock.patch.object(flow_plan, "_words", _same)
    with kernels, words:
        yield


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _check_compiler(device: torch.device) -> None:
    """Compiles one addition. Raises InnerloopError with what torch.compile says, and the remedy."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        needed = "a C++ compiler (g++ or clang++)" if device.type == "cpu" else "Triton and a C compiler (gcc or clang)"
        raise InnerloopError(
            f"torch.compile does not work here for {device}: {reason}. It needs {needed} and Python's headers; "
            "install them (on Debian: apt install g++ python3-dev), or leave torch-compile out of --against"
        ) from error
