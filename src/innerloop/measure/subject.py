"""A loaded policy as the clock wants it: the same call, whole or in parts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from innerloop.contract import Chunk, InnerloopError, ObservationError, Plan
from innerloop.engine import DTYPES, LoadedPolicy
from innerloop.measure.clock import Facts, Prepared, Profiled, Workload
from innerloop.measure.cost import Cost, stage_costs
from innerloop.measure.interpreted import Interpreted, prepare
from innerloop.measure.message import Message
from innerloop.measure.observations import SHORTEST, Scene, make_noises, make_observations, prompt_of_length
from innerloop.measure.trace import Event, profile_graphs
from innerloop.runtime.profile import COPY_IN, READING

SESSION = "measure"
NO_STAGES = (
    "run",
    COPY_IN,
    READING,
    "preprocess",
    "decide",
    "postprocess",
    "total",
)  # in a decision's or chunk's timing
OBSERVATIONS = 20  # different ones, in turn: every decision has new frames, state and noise


class PolicySubject:
    """Satisfies clock.Subject. Plans of more than one row decide through `decide_batch`, whose rows are prepared one
    by one."""

    def __init__(self, policy: LoadedPolicy, random_weights: bool = False) -> None:
        self.policy = policy
        self._random = random_weights
        self._interpreted = Interpreted(policy)

    @property
    def device(self) -> torch.device:
        """Where its stages run."""
        return self.policy.placement.device

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Plans by prompt capacity."""
        return self.policy.plans

    @property
    def facts(self) -> Facts:
        """What a record says of it."""
        policy, placement = self.policy, self.policy.placement
        return Facts(
            policy=policy.family.name,
            weights="random" if self._random or policy.account is None else policy.account.digest,
            dtype=next(name for name, dtype in DTYPES.items() if dtype is placement.dtype),
            precision=placement.precision,
            kernels=policy.kernels,
            memory=policy.memory.total,
            fingerprint=policy.fingerprint,
            batch=placement.batch,
            views=len(policy.config.cameras),
            chunk=policy.config.chunk,
            steps=policy.config.steps,
        )

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> Chunk:
        """The whole call."""
        return self.policy.infer(observation, noise=noise, session=SESSION)

    def prepare(self, observation: Mapping[str, Any], noise: np.ndarray) -> Prepared:
        """The host part before the device."""
        return prepare(self.policy, observation, noise)

    def profile(self, prepared: Prepared) -> Profiled:
        """The device part, with an event between stages."""
        decision = self.policy.runtime.decide(SESSION, prepared.inputs, prepared.capacity, profile=True)
        return _profiled(decision.outputs, decision.timing)

    def infer_in_parts(self, observation: Mapping[str, Any], noise: np.ndarray) -> Profiled:
        """The whole call, with an event between stages."""
        chunk = self.policy.profile(observation, noise=noise, session=SESSION)
        return _profiled({"actions": chunk.normalized}, chunk.timing, chunk.timing["preprocess"])

    def decide_batch(self, rows: Sequence[Prepared], profile: bool) -> Profiled:
        """One decision for as many robots as the plan has rows; outputs keep the batch axis."""
        capacity = max(row.capacity for row in rows)
        inputs = [row.inputs for row in rows]
        machine = self.policy.batched or self.policy.runtime
        decision = machine.decide(SESSION, inputs, capacity, profile=profile)
        return _profiled(decision.outputs, decision.timing)

    def interpret(self, prepared: Prepared) -> np.ndarray:
        """Normalised actions from the same plan run eagerly with the same kernels, nothing captured."""
        return self._interpreted.run(prepared)

    def costs(self, prepared: Prepared) -> dict[str, Cost]:
        """Work of every stage, from its reference path."""
        return stage_costs(self.plans[prepared.capacity], prepared.inputs, self.device)

    def launches(self, prepared: Prepared) -> dict[str, int]:
        """Kernels of every stage from the profiler; on a CPU the operators of its reference path."""
        if self.device.type != "cuda":
            return {name: cost.operations for name, cost in self.costs(prepared).items()}
        return {stage: round(sum(map(len, all)) / len(all)) for stage, all in self.kernel_events(prepared).items()}

    def kernel_events(self, prepared: Prepared) -> dict[str, list[list[Event]]]:
        """What the profiler saw on the device, by stage, one list a decision. Raises InnerloopError on a CPU."""
        if self.device.type != "cuda":
            raise InnerloopError("kernels are profiled on a GPU; on a CPU look at a trace (--trace FILE)")
        decide = partial(self.policy.runtime.decide, SESSION, prepared.inputs, prepared.capacity)
        self.policy.reset(SESSION)
        timing = decide(profile=True).timing
        stages = list(_stage_times(timing))

        def afresh() -> None:
            self.policy.reset(SESSION)  # so that every stage is due
            decide()

        return profile_graphs(afresh, stages, timing["run"])


def make_workload(
    policy: LoadedPolicy, frame: tuple[int, int], prompt_tokens: int, wire: Message, seed: int = 0, raised: bool = False
) -> Workload:
    """Synthetic observations for a policy. Raises InnerloopError where no prompt of so few tokens exists.

    raised: the shortest prompt there is instead.
    """
    processor = policy.processor
    scene = Scene(policy.cameras, frame, processor.widths.state)
    observations = make_observations(scene, SHORTEST, OBSERVATIONS, seed)
    shortest = max(_tokens(policy, one) for one in observations)
    if shortest > prompt_tokens and not raised:
        raise InnerloopError(f"this policy's shortest prompt has {shortest} tokens; ask for at least as many")
    prompt_tokens = max(prompt_tokens, shortest)

    def count(prompt: str) -> int:
        try:
            return max(_tokens(policy, {**one, "prompt": prompt}) for one in observations)
        except ObservationError:
            return prompt_tokens + 1  # longer than the policy takes

    prompt = prompt_of_length(prompt_tokens, count)
    noises = make_noises(processor.widths.chunk, processor.widths.max_action, OBSERVATIONS, seed)
    return Workload([{**one, "prompt": prompt} for one in observations], noises, wire)


def _tokens(policy: LoadedPolicy, observation: Mapping[str, Any]) -> int:
    return int(policy.processor.prepare(observation).inputs["prompt_length"][0])


def _profiled(outputs: dict[str, np.ndarray], timing: Mapping[str, float], preprocess: float = 0.0) -> Profiled:
    return Profiled(outputs, timing.get(COPY_IN, 0.0), _stage_times(timing), timing.get(READING, 0.0), preprocess)


def _stage_times(timing: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by stage; programs are named plan/stage where capacities differ, a+b where stages were merged."""
    return {name.rpartition("/")[2]: ms for name, ms in timing.items() if name not in NO_STAGES}
