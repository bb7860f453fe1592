"""The whole call in seven stages, from the received bytes to actions in robot units."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from innerloop.contract import Chunk, Plan
from innerloop.measure.cost import Cost
from innerloop.measure.distribution import Settled, within
from innerloop.runtime.windows import Value

SEVEN = ("receive", "preprocess", "transfer", "vision", "context", "action", "postprocess")
DEVICE_STAGES = ("vision", "context", "action")
HOST_STAGES = tuple(name for name in SEVEN if name not in DEVICE_STAGES)


class Wire(Protocol):
    """How an observation travels."""

    @property
    def name(self) -> str:
        """What a record calls it."""
        ...

    def pack(self, observation: Mapping[str, Any]) -> bytes:
        """The message a client sends."""
        ...

    def unpack(self, message: bytes) -> dict[str, Any]:
        """The observation in a message."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a record says of a policy.

    weights: "random" or a digest. precision names a matrix rate of the ceilings. kernels: what really runs.
    memory: bytes on the device, planned.
    """

    policy: str
    weights: str
    dtype: str
    precision: str
    kernels: str
    memory: int
    fingerprint: str
    batch: int
    views: int
    chunk: int
    steps: int


@dataclass(frozen=True)
class Prepared:
    """A preprocessed observation: plan inputs as arrays, the capacity chosen, and what `finish` needs again."""

    inputs: dict[str, Value]
    capacity: int
    prompt_tokens: int
    context: Any


@dataclass(frozen=True)
class Profiled:
    """One decision: outputs, and milliseconds of the copy in and of every stage run.

    reading_ms: what reading the marks took, which no other decision does. preprocess_ms: the host's part before the
    device had anything to do.
    """

    outputs: dict[str, np.ndarray]
    transfer_ms: float
    stages_ms: dict[str, float]
    reading_ms: float = 0.0
    preprocess_ms: float = 0.0


class Subject(Protocol):
    """What is measured: a policy whose call can also be taken apart."""

    @property
    def device(self) -> torch.device:
        """Where its stages run."""
        ...

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Plans by prompt capacity."""
        ...

    @property
    def facts(self) -> Facts:
        """What a record says of it."""
        ...

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> Chunk:
        """The whole call, as users make it."""
        ...

    def costs(self, prepared: Prepared) -> dict[str, Cost]:
        """Work of every stage that runs each decision, by the plan's stage names."""
        ...

    def launches(self, prepared: Prepared) -> dict[str, int]:
        """Kernels (on a CPU: operators) of every stage, by the plan's stage names."""
        ...

    def interpret(self, prepared: Prepared) -> np.ndarray:
        """Normalised actions from the same plan run eagerly, nothing captured."""
        ...

    def prepare(self, observation: Mapping[str, Any], noise: np.ndarray) -> Prepared:
        """Its host part before the device."""
        ...

    def infer_in_parts(self, observation: Mapping[str, Any], noise: np.ndarray) -> Profiled:
        """The whole call, its parts timed."""
        ...


@dataclass(frozen=True)
class Workload:
    """Observations with their noise, decided upon in turn, as messages of one wire format."""

    observations: Sequence[Mapping[str, Any]]
    noises: Sequence[np.ndarray]
    wire: Wire


def clock_calls(subject: Subject, workload: Workload, ticks: int, seconds: float) -> Settled:
    """Wall-clock milliseconds of whole calls, messages in turn, after warm-up: `ticks`, or as many as fit into `seconds`."""
    messages = [workload.wire.pack(observation) for observation in workload.observations]
    turn = 0

    def call() -> float:
        nonlocal turn
        message, noise = messages[turn % len(messages)], workload.noises[turn % len(workload.noises)]
        turn += 1
        start = time.perf_counter_ns()
        subject.infer(workload.wire.unpack(message), noise)
        return (time.perf_counter_ns() - start) / 1e6

    return within(call, ticks, seconds)


def clock_stages(subject: Subject, workload: Workload, ticks: int) -> dict[str, list[float]]:
    """Milliseconds of each of the seven stages, in a pass of its own."""
    messages = [workload.wire.pack(observation) for observation in workload.observations]
    samples: dict[str, list[float]] = {name: [] for name in SEVEN}
    for turn in range(ticks):
        message, noise = messages[turn % len(messages)], workload.noises[turn % len(workload.noises)]
        for name, value in _call_in_stages(subject, workload.wire, message, noise).items():
            samples[name].append(value)
    return samples


def seventh(plan: Plan, stage: str) -> str:
    """Which of the seven a plan's stage belongs to: vision by name, action by noise or output, else context.

    Stages captured as one have names joined by "+" and count as the last of them.
    """
    stage = stage.rpartition("+")[2]
    if stage.startswith("vision"):
        return "vision"
    return "action" if plan.answers(stage) or plan.clock(stage) == "step" else "context"


def _call_in_stages(subject: Subject, wire: Wire, message: bytes, noise: np.ndarray) -> dict[str, float]:
    received = time.perf_counter_ns()
    observation = wire.unpack(message)
    decoded = time.perf_counter_ns()
    profiled = subject.infer_in_parts(observation, noise)
    done = time.perf_counter_ns()
    times = dict.fromkeys(SEVEN, 0.0)
    times["receive"] = (decoded - received) / 1e6
    times["preprocess"] = profiled.preprocess_ms
    times["transfer"] = profiled.transfer_ms
    plan = next(iter(subject.plans.values()))  # all of them have the same stages
    for stage, value in profiled.stages_ms.items():
        times[seventh(plan, stage)] += value
    known = profiled.preprocess_ms + profiled.transfer_ms + sum(profiled.stages_ms.values()) + profiled.reading_ms
    times["postprocess"] = max((done - decoded) / 1e6 - known, 0.0)
    return times
