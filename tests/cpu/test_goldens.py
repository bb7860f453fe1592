"""LeRobot's numbers on the tiny checkpoints (tests/golden, made by scripts/make_goldens.py), met without LeRobot."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import innerloop
from innerloop.measure.parity import intermediates
from innerloop.process.state import Normalizer
from innerloop.process.text import Tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
FAMILIES = ("pi05", "pi0")
ABOUT = {family: json.loads((GOLDEN / f"{family}.json").read_text()) for family in FAMILIES}
CASES = [(family, number) for family in FAMILIES for number in range(len(ABOUT[family]["cases"]))]


@pytest.fixture(scope="module")
def policies():
    loaded = {f: innerloop.load(ROOT / ABOUT[f]["checkpoint"], device="cpu", precision="fp32") for f in FAMILIES}
    yield loaded
    for policy in loaded.values():
        policy.close()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, policies):
    """LeRobot's arrays, ours, and the description of one case."""
    family, number = request.param
    about, arrays = ABOUT[family], np.load(GOLDEN / f"{family}.npz")
    golden = {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{number}/")}
    policy, described = policies[family], about["cases"][number]
    images = dict.fromkeys(policy.config.cameras) | {
        camera: frame(*source) for camera, source in described["frames"].items()
    }
    observation = {"images": images, "state": golden["raw_state"], "prompt": described["prompt"]}
    return policy, golden, intermediates(policy, observation, golden["noise"]), observation, about


def frame(name, box, repeat):
    top, left, height, width = box
    pixels = np.asarray(Image.open(ROOT / "examples" / "frames" / name).convert("RGB"))
    return pixels[top : top + height, left : left + width].repeat(repeat, 0).repeat(repeat, 1)


def close(ours, golden, limit):
    np.testing.assert_allclose(ours, golden, rtol=0, atol=limit)


def test_images(case):
    _, golden, ours, _, about = case
    present = golden["camera_mask"]
    pictures = ours["images"][present]
    size = pictures.shape[2]
    close(pictures[:, :, [row for row in about["rows"] if row < size]], golden["image_rows"][present], 1e-6)
    blocks = pictures.reshape(*pictures.shape[:2], size // 14, 14, size // 14, 14).mean((3, 5))
    close(blocks, golden["image_blocks"][present], 1e-6)


def test_discrete_stages_and_state_are_equal(case):
    _, golden, ours, _, _ = case
    np.testing.assert_array_equal(ours["camera_mask"], golden["camera_mask"])
    np.testing.assert_array_equal(ours["tokens"], golden["tokens"])
    np.testing.assert_array_equal(ours["token_mask"], golden["token_mask"])
    np.testing.assert_array_equal(ours["state"], golden["state"])
    patches = (len(golden["position_ids"]) - len(golden["token_mask"])) // len(golden["camera_mask"])
    used = np.concatenate([golden["camera_mask"].repeat(patches), golden["token_mask"]])
    np.testing.assert_array_equal(ours["position_ids"][used], golden["position_ids"][used])


def test_prefix(case):
    _, golden, ours, _, about = case
    present = golden["camera_mask"]
    close(ours["vision"][:, about["patches"]][present], golden["vision"][present], 1e-4)
    start = len(golden["position_ids"]) - len(golden["token_mask"])
    rows = [*about["patches"][:2], start, start + 1]
    used = [present[0], present[0], True, True]
    for name in ("keys", "values"):
        close(ours[name][:, rows][:, used], golden[name][:, used], 1e-4)


def test_actions(case):
    policy, golden, ours, observation, _ = case
    close(ours["velocity.0"], golden["velocity.0"], 1e-4)
    chunk = policy.infer(observation, noise=golden["noise"])
    close(chunk.normalized[:, : golden["normalized"].shape[1]], golden["normalized"], 1e-4)
    np.testing.assert_allclose(chunk.actions, golden["actions"], rtol=0, atol=1e-5 * np.abs(golden["actions"]).max())


@pytest.mark.parametrize("path", ["tiny-pi0/tokenizer.json", "tokenizer.model"])
def test_tokens(path):
    tokenizer = Tokenizer.open(GOLDEN / path)
    golden = json.loads((GOLDEN / "tokens.json").read_text())
    assert {text: list(tokenizer.ids([text])) for text in golden} == golden


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"])
def test_normalization_with_degenerate_statistics(mode):
    arrays = np.load(GOLDEN / "normalization.npz")
    golden = {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{mode}/")}
    normalizer = Normalizer.from_statistics("action", mode, golden)
    np.testing.assert_array_equal(normalizer.apply(golden["value"]), golden["normalized"])
    np.testing.assert_array_equal(normalizer.invert(golden["value"]), golden["unnormalized"])
