"""Qwen3 and Qwen3-VL alone, against what transformers 4.57 computed on the same tiny checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from innerloop.blocks.qwen3 import Qwen3Sizes, rotary
from innerloop.contract import CheckpointError, ObservationError
from innerloop.levels import Level, load_level
from innerloop.process.qwen3vl import ImageRules, positions
from recipes.tiny import qwen

GOLDEN = np.load("tests/golden/qwen.npz")
EVERY = 4  # tokens kept in the goldens
TOLERANCE = 1e-4  # fp32, hidden states of some units


@pytest.fixture(scope="module", params=range(len(qwen.TURNS)), ids=[f"{t.kind}-{len(t.images)}" for t in qwen.TURNS])
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, qwen.Turn, Level]:
    """One turn and the level that answers it."""
    wanted = qwen.TURNS[request.param]
    directory = qwen.write(tmp_path_factory.mktemp("level"), wanted.kind, wanted.seed, wanted.tied)
    return request.param, wanted, load_level(directory, device="cpu")


def test_hidden_states_are_those_before_the_final_norm_after_deepstack(turn: tuple[int, qwen.Turn, Level]) -> None:
    index, wanted, level = turn
    hidden = level.hidden(wanted.text, qwen.pictures(wanted))
    theirs = GOLDEN[f"{index}.hidden"]
    assert hidden[:, ::EVERY].shape == theirs.shape
    np.testing.assert_allclose(hidden[:, ::EVERY], theirs, atol=TOLERANCE, rtol=0)


def test_tokens_and_patches_are_the_processors(turn: tuple[int, qwen.Turn, Level]) -> None:
    index, wanted, level = turn
    cut = [level.rules.patches(image) for image in qwen.pictures(wanted)]
    counts = [len(pixels) // level.rules.merge**2 for pixels, _ in cut]
    assert level.tokenizer.turn(counts, wanted.text) == GOLDEN[f"{index}.ids"].tolist()
    if cut:
        frames = np.concatenate([pixels for pixels, _ in cut]).reshape(-1, 1, 16, 3).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(frames.repeat(2, axis=2).reshape(-1, 96)[::EVERY], GOLDEN[f"{index}.pixels"])


def test_greedy_answer(turn: tuple[int, qwen.Turn, Level]) -> None:
    index, wanted, level = turn
    answer = GOLDEN[f"{index}.answer"].tolist()
    level.ends = frozenset()
    assert level.answer(wanted.text, qwen.pictures(wanted), len(answer)) == answer
    assert level.answer(wanted.text, qwen.pictures(wanted), 1) == answer[:1]
    level.ends = frozenset(answer[3:4])
    assert level.answer(wanted.text, qwen.pictures(wanted), len(answer)) == answer[: answer.index(answer[3])]


def test_an_image_changes_the_answer_and_a_wrong_position_would_too(turn: tuple[int, qwen.Turn, Level]) -> None:
    _, wanted, level = turn
    if not wanted.images:
        pytest.skip("a turn without image")
    pictures = qwen.pictures(wanted)
    hidden = level.hidden(wanted.text, pictures)
    other = level.hidden(wanted.text, [255 - pictures[0], *pictures[1:]])
    assert np.abs(hidden - other).max() > 0.01


def test_an_image_changes_the_answer(tmp_path: Path) -> None:
    level = load_level(qwen.write(tmp_path / "vl", "qwen3_vl", 3), device="cpu")
    assert level.generate("look", [qwen.picture(1, 30, 40)], 5) != level.generate("look", max_tokens=5)


def test_positions_of_two_images_with_text_between() -> None:
    ids = [1, 9, 9, 9, 9, 9, 9, 2, 9, 9, 3]  # 2 x 3 merged cells, then 1 x 2
    found = positions(ids, 9, [(4, 6), (2, 4)], 2)
    assert found[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 7]
    assert found[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 7]
    assert found[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]


def test_rotary_pairs_follow_their_axes() -> None:
    sizes = Qwen3Sizes(8, 1, 8, 1, 1, 16, rope_theta=100.0, sections=(4, 2, 2))
    cos, _ = rotary(torch.tensor([[[1], [2], [3]]]), sizes)
    axis = [1, 2, 3, 1, 2, 3, 1, 1]  # time, height, width interleaved, time where the sections end
    angles = [a / 100.0 ** (2 * j / 16) for j, a in enumerate(axis)]
    torch.testing.assert_close(cos[0, 0], torch.tensor(angles).cos())


def test_smart_resize_limits() -> None:
    rules = ImageRules()  # the published Qwen3-VL
    assert rules.fitted(224, 224) == (256, 256)  # 50,176 pixels are fewer than the least
    assert rules.fitted(480, 640) == (480, 640)
    assert rules.fitted(8000, 6000) == (4704, 3520)
    with pytest.raises(ObservationError, match="too thin"):
        rules.fitted(1, 201)


def test_refusals_name_the_remedy(tmp_path: Path) -> None:
    directory = qwen.write(tmp_path / "text", "qwen3", 3)
    level = load_level(directory, device="cpu")
    with pytest.raises(ObservationError, match="leave the images out"):
        level.hidden("a", [qwen.picture(1, 30, 40)])
    with pytest.raises(ObservationError, match="at least one"):
        level.answer("a", max_tokens=0)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_level(directory, device="cpu")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="levels are qwen3 and qwen3_vl"):
        load_level(directory, device="cpu")


def test_an_image_token_inside_the_text_is_refused(tmp_path: Path) -> None:
    level = load_level(qwen.write(tmp_path, "qwen3_vl", 3), device="cpu")
    with pytest.raises(ObservationError, match="image tokens"):
        level.hidden("<|image_pad|>", [])
