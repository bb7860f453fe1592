"""Sizes of the published Qwen3-VL, for checkpoints that hold its weights but not its config.json."""

from typing import NamedTuple

from innerloop.blocks.qwen3 import Qwen3Sizes
from innerloop.blocks.qwen3_vision import Qwen3VisionSizes
from innerloop.blocks.qwen3_vl import Qwen3VLSizes
from innerloop.contract import CheckpointError

PATCH = 16
PLACES = 48  # rows and columns of learned positions


class Tower(NamedTuple):
    """What tells one size from another."""

    language: tuple[int, int, int, int]  # width, depth, mlp, heads
    vision: tuple[int, int, int]  # width, mlp, layers
    deepstack: tuple[int, ...]


# Qwen/Qwen3-VL-*-Instruct config.json; 8 K/V heads of 128, 16 vision heads, vocabulary 151936
PUBLISHED = {
    "Qwen3-VL-2B": Tower((2048, 28, 6144, 16), (1024, 4096, 24), (5, 11, 17)),
    "Qwen3-VL-4B": Tower((2560, 36, 9728, 32), (1024, 4096, 24), (5, 11, 17)),
    "Qwen3-VL-8B": Tower((4096, 36, 12288, 32), (1152, 4304, 27), (8, 16, 24)),
}


def published(name: str) -> Qwen3VLSizes:
    """Both towers, by the start of the model's name. Raises CheckpointError for another."""
    found = next((tower for known, tower in PUBLISHED.items() if name.startswith(known)), None)
    if found is None:
        raise CheckpointError(
            f"the checkpoint is built on '{name}', whose sizes it does not state; known are {sorted(PUBLISHED)}. "
            "Put that model's directory (config.json, tokenizer.json, preprocessor_config.json) into the checkpoint's"
        )
    (width, depth, mlp, heads), (inner, wide, layers), deepstack = found
    vision = Qwen3VisionSizes(inner, wide, layers, 16, PATCH, PLACES * PATCH, out=width, deepstack=deepstack)
    language = Qwen3Sizes(width, depth, mlp, heads, 8, 128, 151936, tied=not name.startswith("Qwen3-VL-8B"))
    return Qwen3VLSizes(vision, language)
