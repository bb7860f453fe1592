"""Made-up observations of a stated size: smooth pictures, states, prompts of a wanted token count, noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from innerloop.contract import InnerloopError

_CELLS = 12  # a picture is this coarse a random grid, enlarged, so that it compresses as camera pictures do
_GRAIN = 4.0  # sensor noise, standard deviation in 8-bit steps
SHORTEST = "pick"  # a prompt of one word
_SENTENCE = "pick up the red block and put it into the left bowl then push the drawer shut and return to rest"


@dataclass(frozen=True)
class Scene:
    """What a robot has: camera names, frame height and width in pixels, numbers in its state."""

    cameras: Sequence[str]
    frame: tuple[int, int]
    state: int


def frame_size(text: str) -> tuple[int, int]:
    """Height and width of "WIDTHxHEIGHT". Raises InnerloopError for what is no size."""
    width, cross, height = text.partition("x")
    if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise InnerloopError(f"frames '{text}' is no size; write width x height in pixels, such as 640x480")
    return int(height), int(width)


def make_observations(scene: Scene, prompt: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` different observations with one prompt; states in [-1, 1]. The same seed gives the same bytes."""
    rng = np.random.default_rng(seed)
    return [
        {
            "images": {name: _picture(rng, scene.frame) for name in scene.cameras},
            "state": rng.uniform(-1, 1, scene.state).astype(np.float32),
            "prompt": prompt,
        }
        for _ in range(count)
    ]


def make_noises(chunk: int, width: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """`count` standard normal arrays, float32 [chunk, width]."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((chunk, width), dtype=np.float32) for _ in range(count)]


def prompt_of_length(tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest run of plain words whose whole prompt, as `count_tokens` counts it, has at most `tokens` tokens."""
    known = _SENTENCE.split()
    words = known[:1]
    while True:
        longer = [*words, known[len(words) % len(known)]]
        if count_tokens(" ".join(longer)) > tokens:
            return " ".join(words)
        words = longer


def _picture(rng: np.random.Generator, frame: tuple[int, int]) -> np.ndarray:
    height, width = frame
    coarse = Image.fromarray(rng.integers(0, 256, (_CELLS, _CELLS, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = rng.standard_normal(smooth.shape, dtype=np.float32) * _GRAIN
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)
