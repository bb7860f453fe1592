"""A chat turn's arrays: what is made once equals what the whole turn gives; frames side by side."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process.qwen3vl import ChatTokenizer, Encoder, ImageRules, Slots, Special, positions, visual_rows
from innerloop.runtime.threads import in_turn, side_by_side
from recipes.tiny import qwen

PAD = 8
RULES = ImageRules(patch=4, min_pixels=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"patch_size": 1.5}, "patch_size is 1.5"),
        ({"size": {"shortest_edge": "big"}}, r"size\.shortest_edge is 'big'"),
        ({"size": 224.5}, "size is 224.5"),
        ({"max_pixels": -1}, "max_pixels is -1"),
    ],
)
def test_image_limits_that_are_none_are_named(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {message}; it must be"):
        ImageRules.read(tmp_path / "preprocessor_config.json")


def encoder(slots: Slots) -> Encoder:
    """One id a letter."""
    tokenizer = ChatTokenizer(lambda text: [ord(letter) for letter in text], lambda ids: "", Special(7, PAD, 9))
    return Encoder(tokenizer, RULES, slots, derived=lambda ids: {"letters": np.flatnonzero(ids == ord("a"))})


@pytest.mark.parametrize("sizes", [[], [(16, 24)], [(16, 24), (8, 8)]])
@pytest.mark.parametrize("text", ["reach", "open the drawer"])
def test_what_is_made_once_is_what_the_whole_turn_gives(sizes: list[tuple[int, int]], text: str) -> None:
    made, slots = encoder(Slots(3, 24, 120)), Slots(3, 24, 120)
    images = [qwen.picture(i, *size) for i, size in enumerate(sizes)]
    made.encode(images, "another text")
    found, again = made.encode(images, text), made.encode([255 - image for image in images], text)
    grids = [RULES.grid(*size) for size in sizes]
    ids = made.tokenizer.turn([h * w // 4 for h, w in grids], text)
    assert found.tokens == len(ids)
    assert found.inputs["tokens"].tolist() == ids + [0] * (120 - len(ids))
    assert found.inputs["prompt_length"].tolist() == [len(ids)]
    assert found.inputs["positions"][:, : len(ids)].tolist() == positions(ids, PAD, grids, 2).tolist()
    assert found.inputs["visual_rows"][: len(ids)].tolist() == visual_rows(ids, PAD, grids, slots, 2).tolist()
    assert (found.inputs["visual_rows"][len(ids) :] == -1).all()
    assert not found.inputs["positions"][:, len(ids) :].any()
    assert found.inputs["grids"].tolist() == [*map(list, grids), *[[0, 0]] * (3 - len(grids))]
    assert [ids[i] for i in found.inputs["letters"]] == [ord("a")] * ids.count(ord("a"))
    for name, array in found.inputs.items():
        if name not in ("frames", "resizes"):
            assert again.inputs[name] is array
            assert not array.flags.writeable
    for image, frame, words, same in zip(
        images, found.inputs["frames"], found.inputs["resizes"], again.inputs["resizes"], strict=False
    ):
        assert np.shares_memory(frame, image)
        assert words is same
        assert not words.flags.writeable
    assert len(found.inputs["frames"]) == len(found.inputs["resizes"]) == 3


def test_patches_lie_in_merge_order_and_row_by_row() -> None:
    image = qwen.picture(1, 16, 24)
    pixels, grid = RULES.patches(image)
    assert grid == (4, 6)
    places = [(2 * (b // 3) + i // 2, 2 * (b % 3) + i % 2) for b in range(6) for i in range(4)]
    for patch, (row, column) in zip(pixels.reshape(-1, 4, 4, 3), places, strict=True):
        np.testing.assert_array_equal(patch, image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4])


def test_what_does_not_fit_is_refused() -> None:
    small, image = encoder(Slots(1, 24, 60)), qwen.picture(0, 16, 24)
    with pytest.raises(ObservationError, match="more image tokens than there are images"):
        small.encode([image], f"look {chr(PAD)}")
    with pytest.raises(ObservationError, match="2 images were given, there is room for 1"):
        small.encode([image, image], "look")
    with pytest.raises(ObservationError, match="24x24 becomes 6x6 patches, there is room for 24"):
        small.encode([qwen.picture(0, 24, 24)], "look")
    with pytest.raises(ObservationError, match="take 110 tokens, there is room for 60"):
        small.encode([image], "a" * 52)


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_side_by_side_keeps_the_order_and_works_on_threads(count: int) -> None:
    seen = set()
    begun = threading.Barrier(2, timeout=5)

    def work(item: int) -> int:
        seen.add(threading.get_ident())
        if item < 2 <= count:
            begun.wait()  # the caller's and a thread's, at once
        return item * item

    assert side_by_side(work, range(count)) == [item * item for item in range(count)]
    assert len(seen) >= min(count, 2)


def test_in_turn_gives_each_as_soon_as_it_is_there_and_works_on_nothing_once_closed() -> None:
    later, done = threading.Event(), []

    def work(item: int) -> int:
        if item:
            assert later.wait(5)
        done.append(item)
        return item

    results = in_turn(work, range(3))
    assert next(results) == 0  # though a thread still works on the next one
    later.set()
    results.close()
    count = len(done)
    assert done.count(0) == 1
    assert side_by_side(lambda item: item, range(4)) == [0, 1, 2, 3]
    assert len(done) == count


def test_in_turn_on_the_calling_thread_alone() -> None:
    assert set(in_turn(lambda item: threading.get_ident(), range(3), threads=False)) == {threading.get_ident()}


def test_side_by_side_raises_what_the_work_raises() -> None:
    for bad in range(4):
        with pytest.raises(ZeroDivisionError):
            side_by_side(lambda item: 1 // item, [int(i != bad) for i in range(4)])
