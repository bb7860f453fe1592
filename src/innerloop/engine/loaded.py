"""A policy that is ready: observations in, chunks out, from any thread."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from innerloop import __version__
from innerloop.contract import (
    Chunk,
    ObservationError,
    Plan,
    Previous,
    Receipt,
)
from innerloop.engine.placement import Placement
from innerloop.policies import Family
from innerloop.policies.interface import Draft, Processor
from innerloop.runtime.machine import Machine
from innerloop.weights import (
    Account,
    MemoryPlan,
)

BATCH_SESSION = "innerloop batch"


@dataclass
class LoadedPolicy:
    """A checkpoint ready to decide. Satisfies contract.Policy; safe to call from any thread."""

    family: Family
    config: Any  # the family's own; a policies.interface.PolicyConfig
    placement: Placement
    model: nn.Module
    processor: Processor
    runtime: Machine  # of one robot
    account: Account | None
    memory: MemoryPlan
    fingerprint: str
    packed: bool  # the expert's products are in the few-row kernels' layout
    tuned: int  # launch choices taken over from `innerloop tune`
    batched: Machine | None = None  # of `placement.batch` robots at once, over the same weights
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each part of loading
    notes: tuple[str, ...] = ()  # what a user should know of the checkpoint but need not change
    statistics: str = ""  # the set of statistics chosen, where sets have names

    def __post_init__(self) -> None:
        self._bytes = self.memory.by_role()

    @functools.cached_property
    def _device(self) -> str:
        return str(self.placement.device)

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Prompt capacity -> plan, over the same buffers."""
        return self.runtime.plans

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras of an observation in checkpoint order; not the slots that this robot does not fill."""
        return tuple(self.processor.describe().get("cameras", self.config.cameras))

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client must know: plain data. Where dimensions have names, also state_groups and action_groups."""
        described = self.processor.describe()
        return {
            "policy": self.family.name,
            "fingerprint": self.fingerprint,
            "precision": self.placement.precision,
            "device": str(self.placement.device),
            "kernels": self.kernels,
            "cameras": list(self.cameras),
            "horizon": described.get("horizon", self.config.chunk),
            "steps": self.config.steps,
            "prompt_capacities": list(self.plans),
            "max_batch": self.placement.batch,
            "engine": __version__,
            "memory": self._bytes,
            "state_dim": self.processor.widths.state,
            "action_dim": self.processor.widths.action,
            **{name: described[name] for name in ("state_groups", "action_groups") if name in described},
            "processing": described,
        }

    @functools.cached_property
    def kernels(self) -> str:
        """What really runs: reference, operators or fused; `+skinny` where the expert's few-row CUDA kernels do."""
        if self.placement.device.type == "cpu":
            return "reference"
        tuned = f", {self.tuned} tuned launches" if self.tuned else ""
        return f"{self.placement.kernels}{'+skinny' if self.packed else ''}{tuned}"

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        session: str = "default",
        previous: Previous | None = None,
    ) -> Chunk:
        """One decision from {"images": {camera: uint8 HWC}, "state": float [n], "prompt": str}.

        noise float32 [horizon, max_action_dim] pins the solver's start; seed draws the same on every machine;
        neither draws fresh noise. previous: what the new chunk continues (real-time chunking).
        Raises ObservationError and NonFiniteError.
        """
        return self._decide(_Asked(observation, noise, seed, previous), session)

    def profile(self, observation: Mapping[str, Any], *, noise: np.ndarray, session: str) -> Chunk:
        """`infer` with marks between the stages: `timing` also holds the milliseconds of each of them."""
        return self._decide(_Asked(observation, noise), session, profile=True)

    def infer_batch(
        self,
        observations: Sequence[Mapping[str, Any]],
        *,
        noises: Sequence[np.ndarray | None],
        seeds: Sequence[int | None],
        sessions: Sequence[str],
        previous: Sequence[Previous | None] = (),
    ) -> list[Chunk]:
        """One decision for up to `batch` robots at once; row i depends on input i alone.

        A robot alone is decided for as by `infer`. Several share one session of the batched machine, since another robot
        may stand in a row each time: every stage runs.
        """
        size = self.placement.batch
        if not 0 < len(observations) <= size:
            raise ObservationError(f"{len(observations)} observations for a policy loaded with batch={size}")
        if self.batched is None or len(observations) == 1:
            only = previous[0] if previous else None
            return [self.infer(observations[0], noise=noises[0], seed=seeds[0], session=sessions[0], previous=only)]
        started = time.perf_counter()
        given = zip(observations, noises, seeds, previous or [None] * len(observations), strict=True)
        rows = [self._row(self.processor.begin(each[0]), _Asked(*each)) for each in given]
        processed = time.perf_counter()
        capacity = max(row.capacity for row in rows)
        filled = [*rows, *[rows[-1]] * (size - len(rows))]
        decision = self.batched.decide(BATCH_SESSION, [row.inputs for row in filled], capacity)
        decided = time.perf_counter()
        normalized = decision.outputs["actions"][: len(rows)]
        actions = [self.processor.finish(n, row.context) for n, row in zip(normalized, rows, strict=True)]
        timing = _timing((started, processed, decided, time.perf_counter()), decision.timing)
        return [
            Chunk(a, n, timing, self._receipt(row, decision.stages, capacity))
            for a, n, row in zip(actions, normalized, rows, strict=True)
        ]

    def capacity(self, tokens: int) -> int:
        """The smallest captured prompt capacity that holds `tokens`."""
        for capacity in sorted(self.plans):
            if tokens <= capacity:
                return capacity
        raise ObservationError(
            f"the prompt has {tokens} tokens; this checkpoint holds {max(self.plans)}. Shorten the prompt"
        )

    def session(self, name: str) -> Any:
        """The state of one robot or episode: snapshot, restore, fork, reset."""
        return self.runtime.session(name)

    def reset(self, session: str = "default") -> None:
        """Forget a session's episode."""
        self.runtime.session(session).reset()

    def close(self) -> None:
        """Stop the device thread and free graphs and buffers."""
        self.runtime.close()
        if self.batched is not None:
            self.batched.close()

    def _decide(self, asked: "_Asked", session: str, profile: bool = False) -> Chunk:
        """The device has the images before the host looks at state, prompt and noise."""
        started = time.perf_counter()
        if not isinstance(session, str):
            raise ObservationError(f"session is {session!r}; it takes a name, as session='left-arm'")
        draft = self.processor.begin(asked.observation)
        seen, rows = dict(draft.inputs), list[_Row]()

        def rest() -> tuple[dict[str, Any], int]:
            row = self._row(draft, asked)
            rows.append(row)
            return {name: value for name, value in row.inputs.items() if name not in seen}, row.capacity

        begun = time.perf_counter()
        decision = self.runtime.decide_while(session, seen, rest, profile)
        decided, row = time.perf_counter(), rows[0]
        normalized = decision.outputs["actions"]
        actions = self.processor.finish(normalized, row.context)
        timing = _timing((started, begun, decided, time.perf_counter()), decision.timing)
        return Chunk(actions, normalized, timing, self._receipt(row, decision.stages, row.capacity))

    def _row(self, draft: Draft, asked: "_Asked") -> "_Row":
        prepared = self.processor.complete(draft)
        inputs = prepared.inputs
        inputs["noise"] = self.processor.noise(asked.noise, asked.seed)
        if asked.previous is not None:
            inputs |= self.processor.guidance(asked.previous, prepared.context)
        return _Row(inputs, prepared.context, self.capacity(prepared.context.prompt_tokens), asked.seed)

    def _receipt(self, row: "_Row", stages: tuple[str, ...], capacity: int) -> Receipt:
        return Receipt(
            fingerprint=self.fingerprint,
            policy=self.family.name,
            precision=self.placement.precision,
            device=self._device,
            kernels=self.kernels,
            stages=stages,
            capacity=capacity,
            prompt_tokens=row.context.prompt_tokens,
            seed=row.seed,
            statistics=self.statistics,
            weights_version=self.runtime.weights_version,
            bytes=self._bytes,
        )


class _Asked(NamedTuple):
    """What one robot asks; see `LoadedPolicy.infer`."""

    observation: Mapping[str, Any]
    noise: np.ndarray | None = None
    seed: int | None = None
    previous: Previous | None = None


class _Row(NamedTuple):
    """One robot's part of a decision."""

    inputs: dict[str, Any]
    context: Any
    capacity: int
    seed: int | None


def _timing(clock: tuple[float, float, float, float], device: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds from the four marks of a decision: started, device asked, decided, ended."""
    started, asked, decided, ended = (1e3 * t for t in clock)
    parts = {"preprocess": asked - started, "decide": decided - asked, "postprocess": ended - decided}
    return {**parts, **device, "total": ended - started}
