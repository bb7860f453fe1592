"""Against what LeRobot 0.6.1 computed (scripts/make_goldens.py): states, tokens, pictures and actions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from innerloop.blocks.flow_config import read_lerobot
from innerloop.process import Edge, Normalizer, Processor, Tokenizer, flow_processor, resize_with_pad
from innerloop.process.pipeline import Context
from innerloop.weights import Checkpoint, open_checkpoint

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
MODES = ("MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10")
CASES = [("pi05", 0), ("pi05", 1), ("pi05", 2), ("pi05", 3), ("pi0", 0), ("pi0", 1), ("pi0", 2)]


def golden(family: str, case: int) -> tuple[Checkpoint, dict[str, Any], dict[str, np.ndarray]]:
    about = json.loads((GOLDEN / f"{family}.json").read_text())
    with np.load(GOLDEN / f"{family}.npz") as arrays:
        values = {k.split("/", 1)[1]: arrays[k] for k in arrays.files if k.startswith(f"{case}/")}
    return open_checkpoint(ROOT / about["checkpoint"]), {**about, **about["cases"][case]}, values


def frame(name: str, box: list[int], repeat: int) -> np.ndarray:
    top, left, height, width = box
    pixels = np.asarray(Image.open(ROOT / "examples/frames" / name).convert("RGB"))
    return pixels[top : top + height, left : left + width].repeat(repeat, 0).repeat(repeat, 1)


def observation(processor: Processor, about: dict[str, Any], values: dict[str, np.ndarray]) -> dict[str, Any]:
    images = {c: frame(*about["frames"][c]) if c in about["frames"] else None for c in processor.cameras.names}
    return {"images": images, "state": values["raw_state"], "prompt": about["prompt"]}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_inputs_and_actions_equal_lerobot(family: str, case: int) -> None:
    checkpoint, about, values = golden(family, case)
    sizes = read_lerobot(checkpoint.config)
    processor = flow_processor(sizes, checkpoint, Edge(), sizes.language.vocab_size)
    prepared = processor.prepare(observation(processor, about, values))
    length = int(prepared.inputs["prompt_length"][0])
    assert length == values["token_mask"].sum() == prepared.context.prompt_tokens
    np.testing.assert_array_equal(prepared.inputs["tokens"][:length], values["tokens"][:length])
    assert list(prepared.inputs["camera_mask"]) == [int(c in about["frames"]) for c in processor.cameras.names]
    if family == "pi0":
        width = values["state"].size
        np.testing.assert_array_equal(prepared.inputs["state"][:width], values["state"])
        assert not prepared.inputs["state"][width:].any()
    else:
        assert "state" not in prepared.inputs
    normalized = np.full((sizes.chunk, sizes.max_action_dim), 7.0, np.float32)
    normalized[:, : values["normalized"].shape[1]] = values["normalized"]
    np.testing.assert_array_equal(processor.finish(normalized, prepared.context), values["actions"])


@pytest.mark.parametrize(("family", "case"), CASES)
def test_resize_equals_lerobot(family: str, case: int) -> None:
    checkpoint, about, values = golden(family, case)
    size = checkpoint.config["image_resolution"][0]
    rows = [row for row in about["rows"] if row < size]
    names = read_lerobot(checkpoint.config).cameras
    for camera, source in about["frames"].items():
        picture = 2 * resize_with_pad(frame(*source).astype(np.float32) / 255, size, size) - 1
        picture = picture.transpose(2, 0, 1)
        slot = names.index(camera)
        np.testing.assert_allclose(picture[:, rows], values["image_rows"][slot], atol=2e-6)
        blocks = picture.reshape(3, size // 14, 14, size // 14, 14).mean((2, 4))
        np.testing.assert_allclose(blocks, values["image_blocks"][slot], atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_normalisation_equals_lerobot_bit_for_bit(mode: str) -> None:
    with np.load(GOLDEN / "normalization.npz") as arrays:
        case = {k.split("/")[1]: arrays[k] for k in arrays.files if k.startswith(f"{mode}/")}
    normalizer = Normalizer.from_statistics("action", mode, case)
    np.testing.assert_array_equal(normalizer.apply(case["value"]), case["normalized"])
    np.testing.assert_array_equal(normalizer.invert(case["value"]), case["unnormalized"])


@pytest.mark.parametrize("file", ["examples/checkpoints/tiny-pi05/tokenizer.json", "tests/golden/tokenizer.model"])
def test_token_ids_equal_lerobot(file: str) -> None:
    tokenizer = Tokenizer.open(ROOT / file)
    for text, ids in json.loads((GOLDEN / "tokens.json").read_text()).items():
        assert list(tokenizer.ids([text])) == ids, text


def test_context_carries_the_state_in_robot_units() -> None:
    checkpoint, about, values = golden("pi05", 0)
    processor = flow_processor(read_lerobot(checkpoint.config), checkpoint)
    context: Context = processor.prepare(observation(processor, about, values)).context
    np.testing.assert_array_equal(context.state, values["raw_state"])
    assert context.prompt.startswith("Task: pick up the red block, State: ")
