"""Our own plan in plain torch with torch.compile on each stage: what one line of effort gives."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from innerloop.blocks import flow_plan
from innerloop.contract import InnerloopError, Stage
from innerloop.contract.stage import Tensors
from innerloop.engine import LoadedPolicy
from innerloop.kernels import Kernels, select, skinny
from innerloop.measure.interpreted import Interpreted

log = logging.getLogger(__name__)


class CompiledPolicy:
    """A policy loaded with kernels="reference": each stage one graph of torch.compile's default mode, run in turn.

    Compiles at its first decision, which takes minutes at full size. Raises InnerloopError where torch.compile cannot.
    """

    name = "torch-compile"

    def __init__(self, policy: LoadedPolicy) -> None:
        device = policy.placement.device
        _check_compiler(device)
        self.policy = policy
        self._made: dict[Stage, Stage] = {}
        self._interpreted = Interpreted(policy, self._compiled)
        stages = [stage.name for stage in next(iter(policy.plans.values())).stages if not stage.prepare]
        log.info(
            "%s: %d stages of %s (%s) for %s are compiled at the first decision; at full size that takes minutes",
            self.name, len(stages), policy.family.name, ", ".join(stages), device,
        )  # fmt: skip

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim]; the whole call, un-normalisation included."""
        with _traceable():
            return self._interpreted.infer(observation, noise)

    def _compiled(self, stage: Stage) -> Stage:
        if stage.prepare:  # runs once
            return stage
        if stage not in self._made:
            self._made[stage] = replace(stage, run=_CompiledStage(stage))
        return self._made[stage]


class _CompiledStage:
    """Says how long the first call took."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._ready = stage, False
        self._run = torch.compile(stage.run, fullgraph=True, dynamic=False)

    def __call__(self, tensors: Tensors) -> None:
        given = {name: tensors[name] for name in (*self._stage.reads, *self._stage.writes)}
        if self._ready:
            self._run(given)
            return
        started = time.perf_counter()
        self._run(given)
        self._ready = True
        log.info("%s: %s, %.1f s", CompiledPolicy.name, self._stage.name, time.perf_counter() - started)


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
    chain = mock.patch.object(skinny, "chain", nullcontext)  # only kernels of ours heed it
    words = mock.patch.object(flow_plan, "_words", _same)
    with kernels, chain, words:
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
