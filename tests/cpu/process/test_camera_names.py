"""Cameras are matched by name; every mismatch lists what was expected and what was given."""

import pytest

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process import Cameras

NAMES = ("observation.images.front", "observation.images.wrist", "observation.images.empty_camera_0")


def test_order_is_the_checkpoints_whatever_the_caller_sends() -> None:
    cameras = Cameras(NAMES)
    assert cameras.match({"wrist": "w", "front": "f"}) == ["f", "w", None]
    assert cameras.match({"observation.images.wrist": "w", "front": "f"}) == ["f", "w", None]
    assert cameras.required == ("front", "wrist")
    assert cameras.empty == ("empty_camera_0",)


def test_the_same_names_again_mean_the_new_pictures_and_a_mismatch_is_found_every_time() -> None:
    cameras = Cameras(NAMES)
    for turn in range(3):
        assert cameras.match({"wrist": turn, "front": -turn}) == [-turn, turn, None]
        assert cameras.match({"front": -turn, "wrist": turn}) == [-turn, turn, None]
        with pytest.raises(ObservationError, match="missing: wrist"):
            cameras.match({"front": turn})


def test_rename_applies_at_the_edge() -> None:
    cameras = Cameras(NAMES, rename={"cam_high": "front", "observation.images.cam_low": "observation.images.wrist"})
    assert cameras.match({"cam_low": "l", "cam_high": "h"}) == ["h", "l", None]
    assert cameras.match({"front": "h", "cam_low": "l"}) == ["h", "l", None]


def test_rename_may_swap() -> None:
    assert Cameras(NAMES, rename={"front": "wrist", "wrist": "front"}).match({"front": 1, "wrist": 2}) == [2, 1, None]


def test_the_checkpoints_own_rename_is_honoured_after_the_callers() -> None:
    stored = {
        "observation.images.image": "observation.images.front",
        "observation.images.image2": "observation.images.wrist",
    }
    cameras = Cameras(NAMES, rename={"hand": "image2"}, stored=stored)
    assert cameras.match({"image": "f", "hand": "w"}) == ["f", "w", None]


def test_absent_only_when_declared() -> None:
    cameras = Cameras(NAMES)
    assert cameras.match({"front": "f", "wrist": None}) == ["f", None, None]
    with pytest.raises(ObservationError, match="every camera is declared absent; at least one of front, wrist"):
        cameras.match({"front": None, "wrist": None})


MISMATCHES = [
    (
        {"front": 1},
        r"missing: wrist.*Expected front, wrist \(and empty: empty_camera_0\); given front.*None for a camera",
    ),
    ({"front": 1, "wrist": 2, "top": 3}, r"not in the checkpoint: top.*send exactly the expected ones"),
    ({"front": 1, "hand": 2}, r"missing: wrist; not in the checkpoint: hand.*rename=\{'hand': 'wrist'\}"),
    ({"front": 1, "wrist": 2, "empty_camera_0": 3}, r"empty slots are filled by the engine: leave them out"),
    ({}, r"missing: front, wrist.*given none"),
    ({"front": 1, "observation.images.front": 2, "wrist": 3}, r"both mean 'front'"),
    ({0: 1}, r"camera names are strings, got 0"),
]


@pytest.mark.parametrize(("given", "message"), MISMATCHES)
def test_mismatches_say_what_was_expected_and_given(given: dict[str, object], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        Cameras(NAMES).match(given)


def test_renames_are_validated_before_any_frame() -> None:
    with pytest.raises(ObservationError, match=r"rename maps camera 'a' to 'top', which is not a camera.*front, wrist"):
        Cameras(NAMES, rename={"a": "top"})
    with pytest.raises(ObservationError, match="'empty_camera_0'"):
        Cameras(NAMES, rename={"a": "empty_camera_0"})
    with pytest.raises(CheckpointError, match=r"rename_observations_processor maps 'a' to 'top'"):
        Cameras(NAMES, stored={"a": "top"})
    with pytest.raises(CheckpointError, match="no camera"):
        Cameras(("empty_camera_0",))
