"""The official implementation of a checkpoint, or of a family with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from innerloop.measure.against.groot import LeRobotGroot
from innerloop.measure.against.lerobot import LeRobotPolicy
from innerloop.policies.interface import Processor
from innerloop.weights import open_checkpoint

Official = LeRobotPolicy | LeRobotGroot


def open_official(checkpoint: Path, device: str, dtype: str, assets: str | None = None) -> Official:
    """LeRobot's policy of a directory; assets as in innerloop.load. Raises InnerloopError where LeRobot is missing."""
    opened = open_checkpoint(checkpoint, assets=assets)
    if opened.layout == "groot":
        return LeRobotGroot(checkpoint, str(opened.assets), device, dtype)
    return LeRobotPolicy(checkpoint, device, dtype)


def random_official(
    family: str, config: Any, synthetic: Callable[[Any], Processor], device: str, dtype: str
) -> Official:
    """LeRobot's policy of a published size without files; its weights are given to the other side."""
    processor = synthetic(config)
    if family == "groot":
        return LeRobotGroot.random(processor, config, device, dtype)
    return LeRobotPolicy.random(
        family,
        processor,
        config.cameras,
        device,
        dtype,
        chunk_size=config.chunk,
        n_action_steps=config.chunk,
        num_inference_steps=config.steps,
    )
