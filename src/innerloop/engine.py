"""Checkpoint -> policy -> plan -> session: the only file that knows every room."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from innerloop import __version__
from innerloop.blocks.expert import ActionExpert
from innerloop.contract import (
    CheckpointError,
    Chunk,
    ObservationError,
    Plan,
    PrecisionError,
    Previous,
    Receipt,
    Role,
)
from innerloop.kernels import Kernels, launch, skinny, use_kernels
from innerloop.policies import FAMILIES, Family, detect
from innerloop.policies.interface import PolicyConfig, Processor
from innerloop.process.build import Edge
from innerloop.runtime.machine import Machine
from innerloop.weights import (
    Account,
    MemoryPlan,
    TensorSource,
    digest_json,
    fingerprint,
    free_memory,
    load_weights,
    open_checkpoint,
    processors_digest,
    statistics_digest,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Progress = Callable[[str, int, int], None]  # what, done, total
Announce = Callable[[str], None]  # one line, or the memory plan, before something that takes time or memory


class Identity(NamedTuple):
    """Digests of what a checkpoint holds beside its weights."""

    statistics: str
    processors: str
    adapter: str | None


NO_FILES = Identity("", "", None)
BATCH_SESSION = "innerloop batch"


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs."""

    device: torch.device
    precision: str
    batch: int = 1
    kernels: Kernels = "fused"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations; norms, heads and the solver stay float32."""
        return DTYPES[self.precision]


@dataclass
class LoadedPolicy:
    """A checkpoint ready to decide. Satisfies contract.Policy; safe to call from any thread."""

    family: Family
    config: Any  # the family's own; a policies.interface.PolicyConfig
    placement: Placement
    model: nn.Module
    processor: Processor
    runtime: Machine
    account: Account | None
    memory: MemoryPlan
    fingerprint: str
    packed: bool  # the expert's products are in the few-row kernels' layout
    tuned: int  # launch choices taken over from `innerloop tune`
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each part of loading
    notes: tuple[str, ...] = ()  # what a user should know of the checkpoint but need not change
    statistics: str = ""  # the set of statistics chosen, where sets have names

    @property
    def plans(self) -> Mapping[int, Plan]:
        """Prompt capacity -> plan, over the same buffers."""
        return self.runtime.plans

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client must know: plain data."""
        return {
            "policy": self.family.name,
            "fingerprint": self.fingerprint,
            "precision": self.placement.precision,
            "device": str(self.placement.device),
            "kernels": self.kernels,
            "cameras": list(self.config.cameras),
            "horizon": self.config.chunk,
            "steps": self.config.steps,
            "prompt_capacities": list(self.plans),
            "max_batch": self.placement.batch,
            "engine": __version__,
            "memory": self.memory.by_role(),
            "state_dim": self.processor.widths.state,
            "action_dim": self.processor.widths.action,
            "processing": self.processor.describe(),
        }

    @property
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
        if self.placement.batch > 1:
            return self.infer_batch(
                [observation], noises=[noise], seeds=[seed], sessions=[session], previous=[previous]
            )[0]
        started = time.perf_counter()
        row = self._row(observation, noise, seed, previous)
        processed = time.perf_counter()
        decision = self.runtime.decide(session, row.inputs, row.capacity)
        decided = time.perf_counter()
        normalized = decision.outputs["actions"]
        actions = self.processor.finish(normalized, row.context)
        timing = _timing((started, processed, decided, time.perf_counter()), decision.timing)
        return Chunk(actions, normalized, timing, self._receipt(row, decision.stages, row.capacity))

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

        Rows share one session of the runtime, since another robot may stand in a row each time: every stage runs.
        """
        size = self.placement.batch
        if not 0 < len(observations) <= size:
            raise ObservationError(f"{len(observations)} observations for a policy loaded with batch={size}")
        if size == 1:
            only = previous[0] if previous else None
            return [self.infer(observations[0], noise=noises[0], seed=seeds[0], session=sessions[0], previous=only)]
        started = time.perf_counter()
        given = zip(observations, noises, seeds, previous or [None] * len(observations), strict=True)
        rows = [self._row(*each) for each in given]
        processed = time.perf_counter()
        capacity = max(row.capacity for row in rows)
        filled = [*rows, *[rows[-1]] * (size - len(rows))]
        decision = self.runtime.decide(BATCH_SESSION, [row.inputs for row in filled], capacity)
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

    def _row(
        self, observation: Mapping[str, Any], noise: np.ndarray | None, seed: int | None, previous: Previous | None
    ) -> "_Row":
        prepared = self.processor.prepare(observation)
        inputs = {**prepared.inputs, "noise": self.processor.noise(noise, seed)}
        if previous is not None:
            inputs |= self.processor.guidance(previous, prepared.context)
        return _Row(inputs, prepared.context, self.capacity(prepared.context.prompt_tokens), seed)

    def _receipt(self, row: "_Row", stages: tuple[str, ...], capacity: int) -> Receipt:
        return Receipt(
            fingerprint=self.fingerprint,
            policy=self.family.name,
            precision=self.placement.precision,
            device=str(self.placement.device),
            kernels=self.kernels,
            stages=stages,
            capacity=capacity,
            prompt_tokens=row.context.prompt_tokens,
            seed=row.seed,
            statistics=self.statistics,
            weights_version=self.runtime.weights_version,
        )


class _Row(NamedTuple):
    """One robot's part of a decision."""

    inputs: dict[str, Any]
    context: Any
    capacity: int
    seed: int | None


def _timing(clock: tuple[float, float, float, float], device: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds from the four marks of a decision: begun, processed, decided, ended."""
    begun, processed, decided, ended = (1e3 * t for t in clock)
    parts = {"preprocess": processed - begun, "decide": decided - processed, "postprocess": ended - decided}
    return {**parts, **device, "total": ended - begun}


def load(
    path: str | Path,
    *,
    device: str | None = None,
    precision: str | None = None,
    horizon: int | None = None,
    edge: Edge = Edge(),
    assets: str | None = None,
    adapter: str | Path | None = None,
    memory_cap: int | None = None,
    batch: int = 1,
    kernels: Kernels = "fused",
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> LoadedPolicy:
    """A checkpoint directory (LeRobot, openpi PyTorch or Orbax) -> a policy that is ready.

    precision: fp32 or bf16 (default bf16 on CUDA, fp32 elsewhere). horizon: only where an openpi directory does not
    state it. assets: which statistics, where there are several. edge: what only the caller knows (camera renames, image
    layout, tokenizer, limits, what an openpi directory does not say).
    memory_cap: bytes. Raises CheckpointError, MemoryPlanError or PrecisionError before weights are read where it can.
    """
    started = time.perf_counter()
    placement = place(device, precision, batch, kernels)
    checkpoint = open_checkpoint(Path(path), assets=assets, adapter=Path(adapter) if adapter else None)
    family = detect(checkpoint)
    config = family.config(checkpoint, horizon)
    processor = family.processor(config, checkpoint, edge)
    adapter_config = checkpoint.adapter_config
    identity = Identity(
        statistics_digest(checkpoint.statistics),
        processors_digest(checkpoint.preprocessor, checkpoint.postprocessor),
        None if adapter_config is None else digest_json(adapter_config),
    )
    opened = time.perf_counter()
    policy = assemble(family, config, placement, processor, checkpoint.tensors, identity, memory_cap, progress, announce)
    policy.seconds = {"open": opened - started, **policy.seconds}
    policy.notes, policy.statistics = checkpoint.notes, checkpoint.assets or ""
    return policy


def random_policy(
    family: str,
    *,
    cameras: int = 2,
    chunk: int = 10,
    steps: int = 10,
    device: str | None = None,
    precision: str | None = None,
    batch: int = 1,
    kernels: Kernels = "fused",
    seed: int = 0,
) -> LoadedPolicy:
    """The published full size with random weights, for speed: no files, no tokenizer, synthetic statistics."""
    if family not in FAMILIES:
        raise CheckpointError(f"no family '{family}'; there are {sorted(FAMILIES)}")
    kind = FAMILIES[family]
    config = kind.default(cameras, chunk, steps)
    placement = place(device, precision, batch, kernels)
    processor = kind.synthetic(config)
    return assemble(kind, config, placement, processor, RandomWeights(seed), NO_FILES)


@dataclass(frozen=True)
class RandomWeights:
    """Weights drawn on the device: normal with standard deviation 1/sqrt(fan in), 0.1 for vectors."""

    seed: int

    def fill(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """Fill in place; returns a digest that names the draw."""
        for index, (_, parameter) in enumerate(sorted(parameters.items())):
            generator = torch.Generator(parameter.device).manual_seed(self.seed * 100_003 + index)
            deviation = 0.1 if parameter.dim() < 2 else parameter.shape[1] ** -0.5
            parameter.normal_(0.0, deviation, generator=generator)
        return digest_json({"random": self.seed, "device": next(iter(parameters.values())).device.type})


def place(device: str | None, precision: str | None, batch: int, kernels: Kernels) -> Placement:
    """Resolve defaults and refuse what cannot be met. Raises PrecisionError."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise PrecisionError("device 'cuda' was asked for, but torch sees no CUDA device; run innerloop doctor")
    wanted = precision or ("bf16" if where.type == "cuda" else "fp32")
    if wanted == "fp16":
        raise PrecisionError(
            "fp16 is refused: these policies are trained in bf16, whose range fp16 does not have "
            "(activations overflow and actions come out wrong). Ask for bf16 or fp32"
        )
    if wanted not in DTYPES:
        raise PrecisionError(f"precision '{wanted}' does not exist; there are {sorted(DTYPES)}")
    return Placement(where, wanted, batch, kernels)


def assemble(
    family: Family,
    config: PolicyConfig,
    placement: Placement,
    processor: Processor,
    source: TensorSource | RandomWeights,
    identity: Identity,
    memory_cap: int | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> LoadedPolicy:
    """Memory plan, allocation, weights, plans, captured runtime; in this order."""
    clock = [time.perf_counter()]
    with torch.device("meta"):
        model = family.model(config)
    dtypes = _dtypes(model, family, placement.dtype)
    sketch = family.plans(model, placement.batch, placement.dtype, "")
    memory = _memory_plan(model, dtypes, next(iter(sketch.values())))
    say = announce or (lambda _: None)
    say(f"memory plan on {placement.device}\n{memory}")
    memory.check(memory_cap, free_memory(placement.device))
    parameters = _allocate(model, dtypes, placement.device)
    clock.append(time.perf_counter())
    account, digest = _fill(parameters, source, family, config, progress)
    packed = _pack(model, placement, config)
    clock.append(time.perf_counter())
    # the config too: a rotary base or a period changes actions without changing a shape
    manifest = {**next(iter(sketch.values())).manifest(), "config": repr(config)}
    mark = fingerprint(
        weights=digest,
        **identity._asdict(),
        precision=placement.precision,
        plan=manifest,
        kernels={"innerloop": __version__},
    )
    plans = family.plans(model, placement.batch, placement.dtype, mark)
    tuned = _take_tuning(placement.device)
    if account is not None:
        say(str(account))
    if placement.device.type == "cuda":
        say(f"compiling, capturing and checking {len(plans)} prompt capacities: {', '.join(map(str, plans))} tokens")
    samples = {capacity: family.sample(config, placement.batch, capacity) for capacity in plans}
    with use_kernels(placement.kernels):  # the machine keeps the choice
        runtime = Machine(plans, placement.device, samples=samples)
    clock.append(time.perf_counter())
    parts = dict(zip(("allocate", "weights", "capture"), np.diff(clock).tolist(), strict=True))
    return LoadedPolicy(
        family, config, placement, model, processor, runtime, account, memory, mark, packed, tuned, parts
    )


def _take_tuning(device: torch.device) -> int:
    """How many launch choices of `innerloop tune` belong to this device and these versions."""
    file = launch.tuned_file()
    return launch.load(file, device) if device.type == "cuda" and file.is_file() else 0


def _dtypes(model: nn.Module, family: Family, dtype: torch.dtype) -> dict[str, torch.dtype]:
    def kept(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in family.float32)

    return {name: torch.float32 if kept(name) else dtype for name, _ in model.named_parameters()}


def _memory_plan(model: nn.Module, dtypes: Mapping[str, torch.dtype], plan: Plan) -> MemoryPlan:
    weights = [(n, p.numel() * dtypes[n].itemsize, "weights") for n, p in model.named_parameters()]
    buffers = [(b.name, b.bytes, b.role.value) for role in Role for b in plan.by_role(role)]
    return MemoryPlan.of([*weights, *buffers])


def _allocate(model: nn.Module, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, torch.Tensor]:
    real: dict[str, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty(parameter.shape, dtype=dtypes[name], device=device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
        real[name] = empty
    return real


def _fill(
    parameters: Mapping[str, torch.Tensor],
    source: TensorSource | RandomWeights,
    family: Family,
    config: PolicyConfig,
    progress: Progress | None,
) -> tuple[Account | None, str]:
    if isinstance(source, RandomWeights):
        return None, source.fill(parameters)
    report = None if progress is None else lambda done, total: progress("weights", done, total)
    account = load_weights(parameters, source, family.name_table(config), progress=report)
    return account, account.digest


def _pack(model: nn.Module, placement: Placement, config: PolicyConfig) -> bool:
    """Whether the expert's products are now laid out as the few-row kernels read them."""
    rows = placement.batch * config.chunk
    if placement.kernels != "fused" or not skinny.supported(placement.device, placement.dtype, rows):
        return False
    experts = [module for module in model.modules() if isinstance(module, ActionExpert)]
    return all(expert.pack() for expert in experts)


@dataclass(frozen=True)
class Sketch:
    """What a checkpoint would become, from headers alone: a manifest a prompt capacity, memory, plain details."""

    manifests: list[dict[str, Any]]
    memory: MemoryPlan
    details: dict[str, Any]


def sketch(
    path: str | Path, *, precision: str | None = None, horizon: int | None = None, assets: str | None = None
) -> Sketch:
    """Plan and memory of a checkpoint directory. Allocates nothing; raises CheckpointError as `load` would."""
    placement = place("cpu", precision or "bf16", 1, "fused")
    checkpoint = open_checkpoint(Path(path), assets=assets)
    family = detect(checkpoint)
    config = family.config(checkpoint, horizon)
    with torch.device("meta"):
        model = family.model(config)
    plans = family.plans(model, 1, placement.dtype, "")
    memory = _memory_plan(model, _dtypes(model, family, placement.dtype), next(iter(plans.values())))
    details = {
        "family": family.summary,
        "layout": checkpoint.layout,
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": placement.precision,
        "cameras": list(config.cameras),
        "chunk": config.chunk,
        "steps": config.steps,
        "prompt capacities": list(plans),
        "statistics": {name: sorted(stats) for name, stats in checkpoint.statistics.items()},
        "notes": list(checkpoint.notes),
    }
    return Sketch([plan.manifest() for plan in plans.values()], memory, details)
