"""Ours, and other implementations of the same policy with the very same weights, opened from one description."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from innerloop import engine
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import Kernels
from innerloop.measure.bench import Reference
from innerloop.measure.options import PATHS, BenchOptions
from innerloop.policies import FAMILIES, detect
from innerloop.process import edge_of
from innerloop.weights import open_checkpoint

log = logging.getLogger(__name__)
LEROBOT = "lerobot"
COMPILED = "lerobot-compiled"
TORCH_COMPILE = "torch-compile"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Bench:
    """Opens policies for one set of options; LeRobot's, where wanted with random weights, is opened once and gives them.

    Raises InnerloopError for an implementation that does not exist or has not this family.
    """

    def __init__(self, options: BenchOptions) -> None:
        if options.random_weights and options.target not in FAMILIES:
            raise InnerloopError(f"no family '{options.target}' for random weights; there are {sorted(FAMILIES)}")
        _check_given(options)
        self.options = options
        self.placement = engine.place(options.device, options.precision, 1, "fused")
        for name in options.against:
            _check(name, self.family)

    @cached_property
    def family(self) -> str:
        """The family's name; of a checkpoint from its headers."""
        options = self.options
        if options.random_weights:
            return options.target
        return detect(open_checkpoint(Path(options.target), assets=options.assets)).name

    def policy(self, batch: int = 1, kernels: Kernels | None = None) -> LoadedPolicy:
        """Ours; random weights are LeRobot's own where it takes part."""
        options = self.options
        kind: Kernels = kernels or _kernels(options.kernels)
        if not options.random_weights:
            return engine.load(
                options.target,
                device=options.device,
                precision=options.precision,
                horizon=options.chunk,
                batch=batch,
                kernels=kind,
                assets=options.assets,
                adapter=options.adapter,
                edge=edge_of(Path(options.edge) if options.edge else None, options.tokenizer),
                announce=log.info,
            )
        if LEROBOT in options.against:
            return self._with_official_weights(batch, kind)
        return engine.random_policy(
            options.target,
            cameras=options.views,
            chunk=options.actions,
            steps=options.steps,
            device=options.device,
            precision=options.precision,
            batch=batch,
            kernels=kind,
            seed=options.seed,
        )

    @cached_property
    def official(self) -> Any:
        """LeRobot's policy, eager. Raises InnerloopError where LeRobot is not installed."""
        from innerloop.measure.against.opening import open_official, random_official

        options, device, dtype = self.options, str(self.placement.device), _DTYPES[self.placement.precision]
        if not options.random_weights:
            tokenizer = Path(options.tokenizer) if options.tokenizer else None
            return open_official(Path(options.target), device, dtype, options.assets, tokenizer)
        return random_official(options.target, self._config(), FAMILIES[options.target].synthetic, device, dtype)

    @contextmanager
    def references(self) -> Iterator[list[Reference]]:
        """The implementations to compare with, in the order they were asked for; what they hold is freed at the end."""
        with ExitStack() as stack:
            yield [stack.enter_context(KNOWN[name].open(self)) for name in self.options.against]

    def _config(self) -> Any:
        options = self.options
        return FAMILIES[options.target].default(options.views, options.actions, options.steps)

    def _with_official_weights(self, batch: int, kernels: Kernels) -> LoadedPolicy:
        family, config = FAMILIES[self.options.target], self._config()
        placement = engine.place(self.options.device, self.options.precision, batch, kernels)
        weights = self.official.weights()
        return engine.assemble(family, config, placement, family.synthetic(config), weights, engine.NO_FILES)


Opened = AbstractContextManager[Reference]


def _lerobot(made: Bench) -> Opened:
    return nullcontext(made.official)


def _lerobot_compiled(made: Bench) -> Opened:
    from innerloop.measure.against.lerobot import LeRobotPolicy

    if made.options.random_weights:
        raise InnerloopError(f"{COMPILED} needs a checkpoint directory: compilation is asked for at its loading")
    device, dtype = str(made.placement.device), _DTYPES[made.placement.precision]
    policy = LeRobotPolicy(made.options.target, device, dtype, compiled=True)
    policy.name = COMPILED
    return nullcontext(policy)


def _openpi(made: Bench) -> Opened:
    from innerloop.measure.against.openpi import OpenpiPolicy

    return _on_ours(made, OpenpiPolicy)


def _transformers(made: Bench) -> Opened:
    from innerloop.measure.against.transformers import TransformersPolicy

    return _on_ours(made, TransformersPolicy)


def _torch_compile(made: Bench) -> Opened:
    from innerloop.measure.against.torch_compile import CompiledPolicy

    return _on_ours(made, CompiledPolicy)


@contextmanager
def _on_ours(made: Bench, kind: Callable[[LoadedPolicy], Reference]) -> Iterator[Reference]:
    """One that takes weights and processing from a policy of ours in plain torch."""
    with closing(made.policy(kernels="reference")) as policy:
        try:
            yield kind(policy)
        finally:
            torch.compiler.reset()  # what was compiled holds the weights


@dataclass(frozen=True)
class Implementation:
    """The families that it has, and what opens it for as long as it is measured."""

    families: tuple[str, ...]
    open: Callable[[Bench], Opened]


_PI = ("pi05", "pi0")
_HIDDEN = ("groot", *(name for name in FAMILIES if name.startswith("starvla-") and name != "starvla-fast"))

KNOWN: Mapping[str, Implementation] = {
    LEROBOT: Implementation((*_PI, "groot"), _lerobot),
    COMPILED: Implementation(_PI, _lerobot_compiled),
    "openpi": Implementation(_PI, _openpi),
    "transformers": Implementation(_HIDDEN, _transformers),
    TORCH_COMPILE: Implementation(tuple(FAMILIES), _torch_compile),
}


def _check_given(options: BenchOptions) -> None:
    """Raises InnerloopError for an option that would change nothing."""
    idle: tuple[str, ...]
    if options.random_weights:
        idle, why = ("assets", *PATHS), "there are no files"
    else:
        idle, why = ("views", "steps"), "a checkpoint states its own; with --random-weights it counts"
    for field in dataclasses.fields(options):
        if field.name in idle and getattr(options, field.name) != field.default:
            raise InnerloopError(f"--{field.name} changes nothing here: {why}. Leave it out")
    if {LEROBOT, COMPILED}.intersection(options.against) and (options.adapter or options.edge):
        raise InnerloopError(
            "LeRobot opens the checkpoint as it is, so it would run another policy than --adapter and --edge ask for: "
            "leave these out, or LeRobot"
        )


def _check(name: str, family: str) -> None:
    if name not in KNOWN:
        raise InnerloopError(f"nothing named '{name}' to compare with; there are {', '.join(KNOWN)}")
    if family not in KNOWN[name].families:
        others = ", ".join(other for other, known in KNOWN.items() if family in known.families)
        raise InnerloopError(f"{name} has nothing to compare {family} with; use --against {others}")


def _kernels(name: str) -> Kernels:
    known: dict[str, Kernels] = {"reference": "reference", "operators": "operators", "fused": "fused"}
    if name not in known:
        raise InnerloopError(f"no kernels '{name}'; there are {', '.join(known)}")
    return known[name]
