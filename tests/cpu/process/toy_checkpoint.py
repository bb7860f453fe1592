"""Parts of a made-up checkpoint, as plain data: 8 state values, 7 actions, two cameras and an empty slot."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "examples/checkpoints/tiny-pi05/tokenizer.json"
IMAGES = "observation.images."
CAMERAS = ("front", "wrist", "empty_camera_0")


@dataclass
class Step:
    name: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sizes:
    family: str = "pi05"
    cameras: tuple[str, ...] = CAMERAS
    chunk: int = 10
    max_state_dim: int = 32
    max_action_dim: int = 32
    prompt_capacity: int = 64


@dataclass
class Toy:
    path: Path
    layout: str
    config: dict[str, Any]
    preprocessor: list[Step] | None
    postprocessor: list[Step] | None
    statistics: dict[str, dict[str, np.ndarray]]
    tokenizer: Path | None = TOKENIZER
    assets: str | None = None

    def step(self, name: str) -> Step:
        return next(s for s in [*(self.preprocessor or ()), *(self.postprocessor or ())] if s.name == name)


def statistics(state: int = 8, action: int = 7) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    found = {}
    for feature, width in (("observation.state", state), ("action", action)):
        mean, std = rng.standard_normal(width).astype(np.float32), rng.uniform(0.1, 2, width).astype(np.float32)
        stats = {"mean": mean, "std": std, "min": mean - 3 * std, "max": mean + 3 * std}
        stats |= {"q01": mean - 2 * std, "q99": mean + 2 * std, "q10": mean - std, "q90": mean + std}
        found[feature] = stats
    return found


def lerobot(family: str = "pi05", mode: str | None = None) -> Toy:
    """What LeRobot 0.6.1 saves, step by step."""
    mode = mode or {"pi05": "QUANTILES", "pi0": "MEAN_STD"}[family]
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    features: dict[str, Any] = {f"{IMAGES}{c}": {"type": "VISUAL", "shape": [3, 48, 64]} for c in CAMERAS}
    features["observation.state"] = {"type": "STATE", "shape": [8]}
    config = {
        "type": family,
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "normalization_mapping": norm_map,
        "tokenizer_max_length": 64,
        "image_resolution": [28, 28],
        "use_relative_actions": False,
    }
    rename, batch = Step("rename_observations_processor", {"rename_map": {}}), Step("to_batch_processor")
    relative = Step(
        "relative_actions_processor", {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    )
    normalizer = Step("normalizer_processor", {"eps": 1e-8, "norm_map": norm_map})
    tokenizer = Step("tokenizer_processor", {"max_length": 64, "padding_side": "right", "padding": "max_length"})
    device = Step("device_processor", {"device": "cpu", "float_dtype": None})
    if family == "pi05":
        prepare = Step("pi05_prepare_state_tokenizer_processor_step")
        before = [rename, batch, relative, normalizer, prepare, tokenizer, device]
    else:
        before = [rename, batch, Step("pi0_new_line_processor"), tokenizer, device, relative, normalizer]
    after = [
        Step("unnormalizer_processor", {"eps": 1e-8, "norm_map": norm_map}),
        Step("absolute_actions_processor", {"enabled": False}),
        device,
    ]
    return Toy(Path("toy"), "lerobot", *copy.deepcopy((config, before, after)), statistics())


def openpi(**config: Any) -> Toy:
    stats = {f: {k: v.astype(np.float64) for k, v in s.items()} for f, s in statistics().items()}
    return Toy(Path("toy"), "openpi", config, None, None, stats, assets="physical-intelligence/toy")


def observation(state: int = 8, prompt: str = "pick up the red block") -> dict[str, Any]:
    rng = np.random.default_rng(5)
    images = {c: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for c in CAMERAS[:2]}
    return {"images": images, "state": rng.uniform(-1, 1, state).astype(np.float32), "prompt": prompt}


def normalized(sizes: Sizes, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((sizes.chunk, sizes.max_action_dim)).astype(np.float32)


def is_plain(value: Any) -> bool:
    return bool(json.loads(json.dumps(value)) == value)
