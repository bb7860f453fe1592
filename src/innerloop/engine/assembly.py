"""Memory plan, allocation, weights, plans, captured runtime; in this order."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from innerloop import __version__
from innerloop.blocks.dit import DiT
from innerloop.blocks.expert import ActionExpert
from innerloop.contract import (
    Plan,
    Role,
)
from innerloop.engine.loaded import LoadedPolicy
from innerloop.engine.placement import Placement
from innerloop.kernels import launch, skinny, use_kernels
from innerloop.policies import Family
from innerloop.policies.interface import PolicyConfig, Processor
from innerloop.runtime.machine import Machine
from innerloop.weights import (
    Account,
    MemoryPlan,
    TensorSource,
    check_weights,
    digest_json,
    fingerprint,
    free_memory,
    load_weights,
)

Progress = Callable[[str, int, int], None]  # what, done, total
Announce = Callable[[str], None]  # one line, or the memory plan, before something that takes time or memory


class Identity(NamedTuple):
    """Digests of what a checkpoint holds beside its weights."""

    statistics: str
    processors: str
    adapter: str | None


NO_FILES = Identity("", "", None)


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
    """Headers checked, memory plan, allocation, weights, plans, captured runtime; in this order."""
    clock = [time.perf_counter()]
    model = outline(family, config, source)
    dtypes = dtypes_of(model, family, placement.dtype)
    sizes = (1, placement.batch) if placement.batch > 1 else (1,)
    sketches = [next(iter(family.plans(model, size, placement.dtype, "").values())) for size in sizes]
    memory = memory_plan(model, dtypes, *sketches, copies=_copies(model, placement, config))
    say = announce or (lambda _: None)
    say(f"memory plan on {placement.device}\n{memory}")
    memory.check(memory_cap, free_memory(placement.device))
    parameters = _allocate(model, dtypes, placement.device)
    clock.append(time.perf_counter())
    account, digest = _fill(parameters, source, family, config, progress)
    packed = _pack(model, placement, config)
    clock.append(time.perf_counter())
    # the config too: a rotary base or a period changes actions without changing a shape
    manifest = {**sketches[-1].manifest(), "config": repr(config)}
    mark = fingerprint(
        weights=digest,
        **identity._asdict(),
        precision=placement.precision,
        plan=manifest,
        kernels={"innerloop": __version__},
    )
    tuned = _take_tuning(placement.device)
    if account is not None:
        say(str(account))
    machines = [_machine(family, model, config, replace(placement, batch=size), mark, say) for size in sizes]
    clock.append(time.perf_counter())
    parts = dict(zip(("allocate", "weights", "capture"), np.diff(clock).tolist(), strict=True))
    return LoadedPolicy(
        family, config, placement, model, processor, machines[0], account, memory, mark, packed, tuned,
        batched=machines[1] if len(machines) > 1 else None, seconds=parts,
    )  # fmt: skip


def _machine(
    family: Family, model: nn.Module, config: PolicyConfig, placement: Placement, mark: str, say: Announce
) -> Machine:
    """Plans of `placement.batch` rows made ready."""
    plans = family.plans(model, placement.batch, placement.dtype, mark)
    if placement.device.type == "cuda":
        rows = f" for {placement.batch} robots at once" if placement.batch > 1 else ""
        say(
            f"compiling, capturing and checking {len(plans)} prompt capacities{rows}: {', '.join(map(str, plans))} tokens"
        )
    samples = {capacity: family.sample(config, placement.batch, capacity) for capacity in plans}
    with use_kernels(placement.kernels):  # the machine keeps the choice
        return Machine(plans, placement.device, samples=samples)


def outline(family: Family, config: Any, source: TensorSource | RandomWeights) -> nn.Module:
    """The model without memory. Raises CheckpointError where the tensors' headers do not fit it."""
    with torch.device("meta"):
        model = family.model(config)
    if not isinstance(source, RandomWeights):
        check_weights(dict(model.named_parameters()), source, family.name_table(config), _sizes(asdict(config)))
    return model


def _sizes(config: Mapping[str, Any], above: str = "") -> dict[str, int]:
    """Whole numbers of a config by the names that its file has for them: `language.width`."""
    found: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _sizes(value, f"{above}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            found[f"{above}{name}"] = value
    return found


def _take_tuning(device: torch.device) -> int:
    """How many launch choices of `innerloop tune` belong to this device and these versions."""
    file = launch.tuned_file()
    return launch.load(file, device) if device.type == "cuda" and file.is_file() else 0


def dtypes_of(model: nn.Module, family: Family, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameter name -> dtype; what the family keeps in float32 stays so."""

    def kept(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in family.float32)

    return {name: torch.float32 if kept(name) else dtype for name, _ in model.named_parameters()}


def memory_plan(
    model: nn.Module, dtypes: Mapping[str, torch.dtype], *plans: Plan, copies: Iterable[str] = ()
) -> MemoryPlan:
    """Weights, and the buffers of every machine's plan, by role. copies: parameters that are there in two layouts."""
    size = {n: p.numel() * dtypes[n].itemsize for n, p in model.named_parameters()}
    weights = [(n, bytes, "weights") for n, bytes in size.items()]
    weights += [(f"{n}, packed", size[n], "weights") for n in copies]
    buffers = [(b.name, b.bytes, b.role.value) for role in Role for plan in plans for b in plan.by_role(role)]
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
    """Whether the action heads' products are now laid out as the few-row kernels read them.

    One robot's rows decide; where a batch has more than those kernels take, the dense weights stay beside the packed.
    """
    heads = _heads(model)
    keep = not _few(heads.values(), placement, config, placement.batch)
    return _few(heads.values(), placement, config, 1) and all(head.pack(keep=keep) for head in heads.values())


def _copies(model: nn.Module, placement: Placement, config: PolicyConfig) -> list[str]:
    """The parameters that `_pack` will keep in both layouts."""
    heads = _heads(model)
    if not _few(heads.values(), placement, config, 1) or _few(heads.values(), placement, config, placement.batch):
        return []
    return [f"{place}.{name}" for place, head in heads.items() for name in head.packable()]


def _heads(model: nn.Module) -> dict[str, ActionExpert | DiT]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ActionExpert | DiT)}


def _few(heads: Iterable[ActionExpert | DiT], placement: Placement, config: PolicyConfig, robots: int) -> bool:
    """Whether so many robots' rows go through the few-row kernels."""
    rows = {head: head.tokens if isinstance(head, DiT) else config.chunk for head in heads}
    fits = all(
        count <= head.packed_rows and skinny.supported(placement.device, placement.dtype, robots * count)
        for head, count in rows.items()
    )
    return placement.kernels == "fused" and bool(rows) and fits
