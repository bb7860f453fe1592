"""Writes tests/golden/: what LeRobot 0.6.1 computes on the tiny checkpoints, for tests that run without LeRobot.

Run from the repository's root in an environment with LeRobot and sentencepiece: python -m scripts.make_goldens
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from innerloop.measure.against.lerobot import LeRobotPolicy, require
from recipes.tiny import make, tokenizer

GOLDEN = Path("tests/golden")
FRAMES = Path("examples/frames")
CHECKPOINTS = {"pi05": Path("examples/checkpoints/tiny-pi05"), "pi0": GOLDEN / "tiny-pi0"}
PI0 = make.Recipe("pi0", cameras=3, chunk=10, steps=5, capacity=48, state=6, actions=6, image_size=112, seed=5)
ROWS = (0, 3, 28, 55, 84, 111)  # image rows kept exactly, as far as the image has them; whole images are too big
PATCHES = (0, 17, -1)
TEXTS = (
    "pick up the red block",
    "\n",
    "",
    "  two  spaces and_underscores ",
    "Task: open the drawer, State: 0 -1 255 128;\nAction: ",
    "na\u00efve caf\u00e9 \u2014 \u6a5f\u68b0 \U0001f916",
    "tab\there 3.14159",
    "ALL CAPS! (really?)",
)

# A frame is a file of examples/frames, cut to a box (top, left, height, width), each pixel repeated `repeat` times.
WHOLE = (0, 0, 240, 320)
CASES: dict[str, list[dict[str, Any]]] = {
    "pi05": [
        {
            "frames": {"base": ("0-base.png", WHOLE, 1), "wrist": ("0-wrist.png", WHOLE, 1)},
            "prompt": "pick up the red block",
        },
        {"frames": {"wrist": ("1-wrist.png", WHOLE, 2)}, "prompt": "open the_drawer\nnow "},
        {"frames": {"base": ("2-base.png", (8, 48, 224, 224), 1)}, "prompt": ""},
        {
            "frames": {"base": ("3-base.png", (10, 20, 101, 37), 1), "wrist": ("3-wrist.png", (100, 3, 31, 290), 1)},
            "prompt": "na\u00efve caf\u00e9 7",
            "reach": 3.0,
        },
    ],
    "pi0": [
        {
            "frames": {
                "side": ("1-base.png", WHOLE, 1),
                "base": ("0-base.png", (0, 40, 112, 112), 1),
                "wrist": ("0-wrist.png", WHOLE, 1),
            },
            "prompt": "pick up the red block",
        },
        {"frames": {"side": ("2-wrist.png", (5, 5, 200, 77), 2)}, "prompt": " stack_the cubes\n"},
        {"frames": {"base": ("3-base.png", WHOLE, 1), "side": ("3-wrist.png", (90, 0, 19, 320), 1)}, "prompt": ""},
    ],
}


def frame(name: str, box: tuple[int, int, int, int], repeat: int) -> np.ndarray:
    """One uint8 HWC frame of a case."""
    top, left, height, width = box
    pixels = np.asarray(Image.open(FRAMES / name).convert("RGB"))[top : top + height, left : left + width]
    return pixels.repeat(repeat, 0).repeat(repeat, 1)


def golden(policy: LeRobotPolicy, case: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Inputs and results of one case; `reach` scales the state, beyond 1 it leaves the statistics' range."""
    generator = np.random.default_rng(seed)
    config = policy.config
    state = generator.standard_normal(config.input_features["observation.state"].shape).astype(np.float32)
    state *= case.get("reach", 0.7)
    noise = generator.standard_normal((config.chunk_size, config.max_action_dim)).astype(np.float32)
    images = {camera: frame(*source) for camera, source in case["frames"].items()}
    trace = policy.trace({"images": images, "state": state, "prompt": case["prompt"]}, noise)
    pictures, rows = trace.pop("images"), trace["position_ids"].shape[0]
    height = pictures.shape[2]
    kept = {
        "raw_state": state,
        "noise": noise,
        "image_rows": pictures[:, :, [row for row in ROWS if row < height]],
        "image_blocks": pictures.reshape(*pictures.shape[:2], height // 14, 14, height // 14, 14).mean((3, 5)),
        "vision": trace.pop("vision")[:, list(PATCHES)],
    }
    last = [index for index in range(rows) if index >= rows - config.tokenizer_max_length]
    kept |= {name: trace.pop(name)[:, [*PATCHES[:2], last[0], last[1]]] for name in ("keys", "values")}
    steps = config.num_inference_steps
    kept |= {name: trace.pop(name) for name in [f"velocity.{step}" for step in range(steps)] if name == "velocity.0"}
    return kept | {name: value for name, value in trace.items() if not name.startswith("velocity.")}


def write_family(family: str) -> None:
    """<family>.npz holds `<case>/<name>` arrays, <family>.json the frames and prompts they came from."""
    policy = LeRobotPolicy(CHECKPOINTS[family])
    arrays: dict[str, np.ndarray] = {}
    for number, case in enumerate(CASES[family]):
        for name, value in golden(policy, case, seed=number).items():
            arrays[f"{number}/{name}"] = value.astype(np.int32) if value.dtype == np.int64 else value
    np.savez_compressed(GOLDEN / f"{family}.npz", **arrays)  # type: ignore[arg-type]
    about = {"checkpoint": str(CHECKPOINTS[family]), "rows": ROWS, "patches": PATCHES, "cases": CASES[family]}
    (GOLDEN / f"{family}.json").write_text(json.dumps(about, indent=2) + "\n")


def write_tokens() -> None:
    """tokens.json: texts and LeRobot's token ids (BOS first); tokenizer.model: the same tokenizer for SentencePiece."""
    tokenizer.save_sentencepiece(tokenizer.train(PI0.vocabulary), GOLDEN / "tokenizer.model")
    step = require("lerobot.processor").TokenizerProcessorStep(tokenizer_name=str(CHECKPOINTS["pi05"]), max_length=64)
    rows = [step._tokenize_text(text) for text in TEXTS]
    ids = {t: row["input_ids"][row["attention_mask"] == 1].tolist() for t, row in zip(TEXTS, rows, strict=True)}
    (GOLDEN / "tokens.json").write_text(json.dumps(ids, indent=1) + "\n")


def write_normalization() -> None:
    """normalization.npz: `<mode>/<name>` with statistics, some of them degenerate, and both directions by LeRobot."""
    configs, processor = require("lerobot.configs"), require("lerobot.processor")
    feature, kind = configs.PolicyFeature, configs.FeatureType
    generator = torch.Generator().manual_seed(11)
    arrays: dict[str, np.ndarray] = {}
    for mode in make.MODES:
        stats = make.statistics(make.Recipe(state=6, actions=6, seed=11))["action"]
        stats["std"][2] = 0.0
        for low, high in (("min", "max"), ("q01", "q99"), ("q10", "q90")):
            stats[high][4] = stats[low][4]
        features = {"action": feature(kind.ACTION, (6,))}
        arguments = {"features": features, "norm_map": {kind.ACTION: configs.NormalizationMode[mode]}}
        value = 1.5 * torch.randn(5, 6, generator=generator)
        there = processor.NormalizerProcessorStep(**arguments, stats={"action": stats})
        back = processor.UnnormalizerProcessorStep(**arguments, stats={"action": stats})
        case = {"value": value, "normalized": there._normalize_action(value, False)}
        case |= {"unnormalized": back._normalize_action(value, True)} | stats
        arrays |= {f"{mode}/{name}": tensor.numpy() for name, tensor in case.items()}
    np.savez_compressed(GOLDEN / "normalization.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Writes every golden anew."""
    torch.use_deterministic_algorithms(True)
    make.write(CHECKPOINTS["pi05"], make.Recipe())
    make.write(CHECKPOINTS["pi0"], PI0)
    for family in CASES:
        write_family(family)
    write_tokens()
    write_normalization()
    for path in [*GOLDEN.rglob("*.safetensors"), *CHECKPOINTS["pi05"].glob("*.safetensors")]:
        path.chmod(0o644)


if __name__ == "__main__":
    main()
