"""Ours, and the official implementation with the very same weights, opened from one description."""

from functools import cached_property
from pathlib import Path
from typing import Any

from innerloop import engine
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import Kernels
from innerloop.measure.bench import Reference
from innerloop.measure.options import BenchOptions
from innerloop.policies import FAMILIES

LEROBOT = "lerobot"
COMPILED = "lerobot-compiled"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Bench:
    """Opens policies for one set of options; the official side, where wanted, is opened once and gives the weights."""

    def __init__(self, options: BenchOptions) -> None:
        unknown = set(options.against) - {LEROBOT, COMPILED}
        if unknown:
            raise InnerloopError(f"nothing named {', '.join(sorted(unknown))} to compare with; there is {LEROBOT}")
        if options.random_weights and options.target not in FAMILIES:
            raise InnerloopError(f"no family '{options.target}' for random weights; there are {sorted(FAMILIES)}")
        self.options = options
        self.placement = engine.place(options.device, options.precision, 1, "fused")

    def policy(self, batch: int = 1, kernels: Kernels | None = None) -> LoadedPolicy:
        """Ours; random weights are the official side's own where there is one."""
        options = self.options
        kind: Kernels = kernels or _kernels(options.kernels)
        if not options.random_weights:
            return engine.load(
                options.target, device=options.device, precision=options.precision, batch=batch, kernels=kind
            )
        if options.against:
            return self._with_official_weights(batch, kind)
        return engine.random_policy(
            options.target,
            cameras=options.views,
            chunk=options.chunk,
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
            return open_official(Path(options.target), device, dtype)
        return random_official(options.target, self._config(), FAMILIES[options.target].synthetic, device, dtype)

    def references(self) -> list[Reference]:
        """The implementations to compare with, in the order they were asked for."""
        return [self.official if name == LEROBOT else self._compiled() for name in self.options.against]

    def _compiled(self) -> Any:
        from innerloop.measure.against.lerobot import LeRobotPolicy

        if self.options.random_weights:
            raise InnerloopError(f"{COMPILED} needs a checkpoint directory: compilation is asked for at its loading")
        device, dtype = str(self.placement.device), _DTYPES[self.placement.precision]
        policy = LeRobotPolicy(self.options.target, device, dtype, compiled=True)
        policy.name = COMPILED
        return policy

    def _config(self) -> Any:
        options = self.options
        return FAMILIES[options.target].default(options.views, options.chunk, options.steps)

    def _with_official_weights(self, batch: int, kernels: Kernels) -> LoadedPolicy:
        family, config = FAMILIES[self.options.target], self._config()
        placement = engine.place(self.options.device, self.options.precision, batch, kernels)
        weights = self.official.weights()
        return engine.assemble(family, config, placement, family.synthetic(config), weights, engine.NO_FILES)


def _kernels(name: str) -> Kernels:
    known: dict[str, Kernels] = {"reference": "reference", "operators": "operators", "fused": "fused"}
    if name not in known:
        raise InnerloopError(f"no kernels '{name}'; there are {', '.join(known)}")
    return known[name]
