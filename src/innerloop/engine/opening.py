"""From a directory, or from nothing but a family's name, to a policy; or only to a sketch of one."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from innerloop.contract import CheckpointError, InnerloopError
from innerloop.engine.assembly import (
    NO_FILES,
    Announce,
    Identity,
    Progress,
    RandomWeights,
    assemble,
    dtypes_of,
    memory_plan,
    outline,
)
from innerloop.engine.loaded import LoadedPolicy
from innerloop.engine.placement import Placement, place
from innerloop.kernels import Kernels
from innerloop.policies import FAMILIES, detect
from innerloop.policies.interface import Family, Processor
from innerloop.process.build import Edge
from innerloop.weights import (
    Checkpoint,
    MemoryPlan,
    digest_json,
    open_checkpoint,
    processors_digest,
    statistics_digest,
)

_CALLERS = ("normalization", "state_dim", "action_dim", "relative", "state_in_prompt")  # of Edge: what changes actions


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
    """A checkpoint directory (LeRobot, openpi PyTorch or Orbax, GR00T, starVLA) -> a policy that is ready.

    precision: fp32 or bf16 (default bf16 on CUDA, fp32 elsewhere). horizon: only where an openpi directory does not
    state it. assets: which statistics, where there are several. edge: what only the caller knows (camera renames, image
    layout, tokenizer, limits, what an openpi directory does not say).
    memory_cap: bytes. batch: robots decided at once. kernels: reference, operators or fused. progress(what, done, total)
    counts bytes; announce(line) gets the memory plan before anything is allocated, then the account.
    Raises CheckpointError, MemoryPlanError or PrecisionError before weights are read where it can.
    """
    placement = place(device, precision, batch, kernels)
    opened = open_policy(path, horizon=horizon, edge=edge, assets=assets, adapter=adapter)
    return opened.load(placement, memory_cap, progress, announce)


@dataclass(frozen=True)
class Opened:
    """A checkpoint of which the headers are read: its processor knows a bad observation before there are weights."""

    checkpoint: Checkpoint
    family: Family
    config: Any
    processor: Processor
    identity: Identity
    seconds: float

    def load(
        self,
        placement: Placement,
        memory_cap: int | None = None,
        progress: Progress | None = None,
        announce: Announce | None = None,
    ) -> LoadedPolicy:
        """The policy that is ready, as `load` makes it."""
        found, asked = self.checkpoint, (memory_cap, progress, announce)
        policy = assemble(self.family, self.config, placement, self.processor, found.tensors, self.identity, *asked)
        policy.seconds = {"open": self.seconds, **policy.seconds}
        policy.notes, policy.statistics = found.notes, found.assets or ""
        return policy


def open_policy(
    path: str | Path,
    *,
    horizon: int | None = None,
    edge: Edge = Edge(),
    assets: str | None = None,
    adapter: str | Path | None = None,
) -> Opened:
    """The first part of `load`, from headers alone."""
    started = time.perf_counter()
    if not isinstance(edge, Edge):
        raise CheckpointError(f"edge is a {type(edge).__name__}; it takes innerloop.Edge(...) with the same fields")
    checkpoint = open_checkpoint(Path(path), assets=assets, adapter=Path(adapter) if adapter else None)
    family = detect(checkpoint)
    config = family.config(checkpoint, horizon)
    processor = family.processor(config, checkpoint, edge)
    identity = _identity(checkpoint, processor, edge)
    return Opened(checkpoint, family, config, processor, identity, time.perf_counter() - started)


def _identity(checkpoint: Checkpoint, processor: Processor, edge: Edge) -> Identity:
    """Digests of what decides the actions beside weights and sizes: the files, and what only the caller knew."""
    limits = {} if edge.limits is None else {name: _plain(value) for name, value in vars(edge.limits).items()}
    said = {name: _plain(getattr(edge, name)) for name in _CALLERS}
    files = processors_digest(checkpoint.preprocessor, checkpoint.postprocessor)
    tokenizer = hashlib.sha256(Path(processor.describe()["prompt"]["tokenizer"]).read_bytes()).hexdigest()
    adapter = checkpoint.adapter_config
    return Identity(
        statistics_digest(checkpoint.statistics),
        digest_json([files, tokenizer, said, limits]),
        None if adapter is None else digest_json(adapter),
    )


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist() if isinstance(value, Sequence | np.ndarray) else value


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
    model = outline(family, config, checkpoint.tensors)
    plans = family.plans(model, 1, placement.dtype, "")
    memory = memory_plan(model, dtypes_of(model, family, placement.dtype), next(iter(plans.values())))
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
        "processing": _processing(family, config, checkpoint),
        "notes": list(checkpoint.notes),
    }
    return Sketch([plan.manifest() for plan in plans.values()], memory, details)


def _processing(family: Family, config: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Widths, modes, prompt and cameras; or what is still missing for a decision, which a plan does not need."""
    try:
        return family.processor(config, checkpoint, Edge()).describe()
    except InnerloopError as error:
        return {"missing": str(error)}
