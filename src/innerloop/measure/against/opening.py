"""The official implementation of a checkpoint, or of a family with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from innerloop.contract import InnerloopError
from innerloop.measure.against.groot import LeRobotGroot
from innerloop.measure.against.lerobot import LeRobotPolicy
from innerloop.policies.interface import Processor
from innerloop.weights import open_checkpoint

Official = LeRobotPolicy | LeRobotGroot


def open_official(
    checkpoint: Path, device: str, dtype: str, assets: str | None = None, tokenizer: Path | None = None
) -> Official:
    """LeRobot's policy of a directory; assets and tokenizer as in innerloop.load, but a GR00T's is read from its directory.

    Raises InnerloopError where LeRobot is missing, or the tokenizer is no file that it reads.
    """
    opened = open_checkpoint(checkpoint, assets=assets)
    if opened.layout == "groot":
        return LeRobotGroot(checkpoint, str(opened.assets), device, dtype)
    return LeRobotPolicy(checkpoint, device, dtype, tokenizer=None if tokenizer is None else _folder_of(tokenizer))


def _folder_of(tokenizer: Path) -> Path:
    """LeRobot asks transformers for a tokenizer, which reads folders."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if not (folder / "tokenizer.json").is_file():
        raise InnerloopError(
            f"LeRobot reads a tokenizer.json only, and {folder} has none: convert {tokenizer.name} first"
        )
    return folder


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
