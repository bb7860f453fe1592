"""How pi0 and pi0.5 are read from a checkpoint: what tells them apart is one tensor's name."""

from functools import partial
from typing import Any, NamedTuple

from innerloop.blocks import flow_config
from innerloop.blocks.flow_config import FlowConfig
from innerloop.contract import CheckpointError
from innerloop.process.build import Edge, flow_processor
from innerloop.process.pipeline import Processor
from innerloop.process.synthetic import synthetic_processor
from innerloop.weights import Checkpoint


class Reading(NamedTuple):
    """The functions of a Family that read checkpoints, for one of the flow policies."""

    recognises: Any
    config: Any
    processor: Any
    default: Any
    synthetic: Any


def reading(family: str, mark: str, prompt_capacity: int) -> Reading:
    """`mark`: a tensor that only this family has; `prompt_capacity`: of the published configuration."""
    return Reading(
        partial(_recognises, mark),
        partial(_config, family),
        _processor,
        partial(_default, family, prompt_capacity),
        _synthetic,
    )


def _recognises(mark: str, checkpoint: Checkpoint) -> bool:
    return any(name.removeprefix("model.") == mark for name in checkpoint.tensors.names())


def _config(family: str, checkpoint: Checkpoint, horizon: int | None) -> FlowConfig:
    if checkpoint.layout != "lerobot":
        return flow_config.read_openpi(checkpoint.config, family, horizon)
    config = flow_config.read_lerobot(checkpoint.config)
    if horizon is not None and horizon != config.chunk:
        raise CheckpointError(f"horizon={horizon} was asked of a checkpoint trained with chunk_size={config.chunk}")
    return config


def _processor(config: FlowConfig, checkpoint: Checkpoint, edge: Edge) -> Processor:
    return flow_processor(config, checkpoint, edge, config.language.vocab_size)


def _default(family: str, capacity: int, cameras: int, chunk: int, steps: int) -> FlowConfig:
    return flow_config.default(family, cameras, chunk, steps, capacity)


def _synthetic(config: FlowConfig) -> Processor:
    return synthetic_processor(config, config.language.vocab_size)
