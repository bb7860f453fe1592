"""What the engine asks of a policy family, and which family a checkpoint is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from innerloop.blocks.flow_config import FlowConfig, read_lerobot, read_openpi
from innerloop.contract import CheckpointError, Plan
from innerloop.policies import pi0, pi05
from innerloop.policies.pi0 import model as pi0_model
from innerloop.policies.pi0 import plan as pi0_plan
from innerloop.policies.pi0 import weights as pi0_weights
from innerloop.policies.pi05 import model as pi05_model
from innerloop.policies.pi05 import plan as pi05_plan
from innerloop.policies.pi05 import weights as pi05_weights
from innerloop.weights import Checkpoint, NameTable


@dataclass(frozen=True)
class Family:
    """Everything that differs between families, as functions."""

    name: str
    summary: str
    model: Callable[[FlowConfig], nn.Module]
    float32: tuple[str, ...]  # parameter name patterns kept in float32 at any precision
    name_table: Callable[[FlowConfig], NameTable]
    plans: Callable[[Any, int, torch.dtype, str], dict[int, Plan]]
    prompt_capacity: int  # of the published configuration, for random weights

    def config(self, checkpoint: Checkpoint, horizon: int | None) -> FlowConfig:
        """Sizes, cameras, chunk and steps, read from the checkpoint."""
        if checkpoint.layout == "lerobot":
            config = read_lerobot(checkpoint.config)
            if horizon is not None and horizon != config.chunk:
                raise CheckpointError(
                    f"horizon={horizon} was asked of a checkpoint trained with chunk_size={config.chunk}"
                )
            return config
        return read_openpi(checkpoint.config, self.name, horizon)


def _summary(package: Any) -> str:
    return str(package.__doc__).split(":", maxsplit=1)[0]


FAMILIES: Mapping[str, Family] = {
    "pi05": Family(
        "pi05",
        _summary(pi05),
        pi05_model.Pi05,
        pi05_model.FLOAT32,
        pi05_weights.name_table,
        pi05_plan.build,
        prompt_capacity=200,
    ),
    "pi0": Family(
        "pi0",
        _summary(pi0),
        pi0_model.Pi0,
        pi0_model.FLOAT32,
        pi0_weights.name_table,
        pi0_plan.build,
        prompt_capacity=48,
    ),
}


def detect(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint: LeRobot states its type; openpi's shows in the names of its tensors."""
    names = {name.removeprefix("model.") for name in checkpoint.tensors.names()}
    shown = "pi05" if "time_mlp_in.weight" in names else "pi0" if "action_time_mlp_in.weight" in names else None
    stated = checkpoint.config.get("type")
    if stated is not None and stated not in FAMILIES:
        raise CheckpointError(
            f"config.json says type '{stated}', which is not supported; supported are {sorted(FAMILIES)}"
        )
    if shown is None:
        raise CheckpointError(
            f"{checkpoint.path}: neither pi0.5 (time_mlp_in) nor pi0 (action_time_mlp_in) tensors found; "
            f"supported families are {sorted(FAMILIES)}"
        )
    if stated is not None and stated != shown:
        raise CheckpointError(f"config.json says type '{stated}' but the tensors are those of '{shown}'")
    return FAMILIES[shown]
