"""A policy's plans run stage by stage, nothing captured: the meaning of what is captured, and a way to change stages."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from innerloop.contract import Plan, Stage
from innerloop.engine import LoadedPolicy
from innerloop.kernels import use_kernels
from innerloop.measure.clock import Prepared
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter


def prepare(policy: LoadedPolicy, observation: Mapping[str, Any], noise: np.ndarray) -> Prepared:
    """The host part of a decision before the device."""
    prepared = policy.processor.prepare(observation)
    tokens = int(prepared.inputs["prompt_length"][0])
    inputs = {**prepared.inputs, "noise": policy.processor.noise(noise)}
    return Prepared(inputs, policy.capacity(tokens), tokens, prepared.context)


class Interpreted:
    """The policy's plans with its own kernels; `change` may give a stage another function, once for each capacity.

    `memory` makes the buffers of a plan on a device.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        change: Callable[[Stage], Stage] = lambda stage: stage,
        memory: Callable[[Plan, torch.device], Arena] = Arena,
    ) -> None:
        self.policy = policy
        self._change, self._memory = change, memory
        self._opened: dict[int, tuple[Plan, Interpreter]] = {}
        device = policy.placement.device
        # kernels that launch dependent on one another do not do so on the default stream
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def stream(self) -> AbstractContextManager[object]:
        """Work inside it is ordered with what `run` does."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim]; the whole call, un-normalisation included."""
        prepared = prepare(self.policy, observation, noise)
        normalized = self.run(prepared)
        self.policy.processor.finish(normalized, prepared.context)
        return normalized

    def run(self, prepared: Prepared) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim]; the device's part."""
        with use_kernels(self.policy.placement.kernels), self.stream():
            plan, interpreter = self._open(prepared.capacity)
            for name, value in prepared.inputs.items():
                interpreter.write(name, value)
            interpreter.run(plan)
            actions: np.ndarray = interpreter.read("actions").float().numpy(force=True)[0]
        return actions

    def _open(self, capacity: int) -> tuple[Plan, Interpreter]:
        if capacity not in self._opened:
            plan = self.policy.plans[capacity]
            plan = replace(plan, stages=tuple(self._change(stage) for stage in plan.stages))
            arena = self._memory(plan, self.policy.placement.device)
            self._opened[capacity] = plan, Interpreter(plan, arena, check=False)
        return self._opened[capacity]
