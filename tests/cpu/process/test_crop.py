"""The published checkpoints' pictures are the official bytes; squares, crops and the bicubic way."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from innerloop.process import area
from innerloop.process.area import resize_area
from innerloop.process.chat import framing
from innerloop.process.crop import Framing
from recipes.tiny import qwen

DIGESTS: dict[str, str] = json.loads(Path("tests/golden/groot.json").read_text())


@pytest.fixture(params=["numpy", "OpenCV"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of an area resize."""
    if request.param == "OpenCV":
        pytest.importorskip("cv2")
    else:
        monkeypatch.setattr(area, "_opencv", lambda: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", DIGESTS)
def test_area_pictures_are_the_official_bytes(size: str) -> None:
    """cv2's area resize to 256, 95 % of it, and again: shrinking, halving, enlarging (scripts/make_groot_goldens.py)."""
    height, width = (int(side) for side in size.split("x"))
    picture = Framing((256, 256), 256, 0.95, area=True).apply(qwen.picture(height, height, width))
    assert min(picture.shape[:2]) == 256
    assert hashlib.sha256(picture.tobytes()).hexdigest() == DIGESTS[size]


@pytest.mark.usefixtures("way")
def test_whole_cells_are_summed_before_they_are_divided() -> None:
    """What OpenCV 4.13 gives: halves go to the even number, except those of 2 x 2, which go up."""
    frame = np.array([[0, 1, 0, 0], [1, 0, 0, 6], [0, 0, 5, 0], [0, 1, 1, 0]], np.uint8)[..., None].repeat(3, 2)
    assert resize_area(frame, 2, 2)[..., 0].tolist() == [[1, 2], [0, 2]]
    assert resize_area(frame, 4, 2)[..., 0].tolist() == [[0, 0], [0, 3], [0, 2], [0, 0]]


@pytest.mark.parametrize("wanted", [(256, 256), (256, 341), (9, 7), (300, 401), (240, 640), (96, 640), (1, 1)])
def test_numpy_gives_the_bytes_of_opencv(wanted: tuple[int, int]) -> None:
    pytest.importorskip("cv2")
    frame = qwen.picture(3, 480, 640)
    frame.setflags(write=False)  # as one that lies in a message
    np.testing.assert_array_equal(area.by_hand(frame, *wanted), resize_area(frame, *wanted))
    assert resize_area(frame, *wanted).shape == (*wanted, 3)
    larger = (frame.shape[0] + wanted[0], frame.shape[1] + wanted[1])
    np.testing.assert_array_equal(area.by_hand(frame, *larger), resize_area(frame, *larger))


def test_area_resize_keeps_the_mean() -> None:
    frame = qwen.picture(0, 90, 70)
    small = resize_area(frame, 30, 20)
    assert small.shape == (30, 20, 3)
    assert abs(float(small.mean()) - float(frame.mean())) < 0.5


def test_bicubic_pictures_have_the_target_shape() -> None:
    frame = qwen.picture(1, 100, 60)
    made = Framing((32, 48), 40, 0.9).apply(frame)
    assert made.shape == (32, 48, 3)
    untouched = qwen.picture(2, 24, 24)
    assert Framing((24, 24), 24, 1.0).apply(untouched) is untouched


def test_letterbox_is_black_and_centred() -> None:
    frame = np.full((10, 30, 3), 255, np.uint8)
    made = Framing((30, 30), 30, 1.0, area=True, letterbox=True).apply(frame)
    assert made.shape == (30, 30, 3)
    assert (made[:10] == 0).all()
    assert (made[10:20] == 255).all()
    assert (made[20:] == 0).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Framing((256, 256), 256, 230 / 256)),
        ({"image_target_size": [224, 224], "crop_fraction": 0.95, "use_albumentations": True}, Framing((224, 224), 224, 0.95, True)),
        ({"image_target_size": [256, 256], "image_crop_size": [230, 230], "shortest_image_edge": 200}, Framing((256, 256), 200, 230 / 256)),
        ({"image_target_size": [64, 64], "letter_box_transform": True}, Framing((64, 64), 64, 1.0, letterbox=True)),
    ],
)  # fmt: skip
def test_settings_of_processor_config(settings: dict[str, object], expected: Framing) -> None:
    assert framing(settings) == expected


def test_room_for_what_keeps_its_aspect() -> None:
    assert Framing((256, 256), 256, area=True).largest(16 / 9) == (256, 455)
    assert Framing((256, 256), 256, area=True, letterbox=True).largest(16 / 9) == (256, 256)
    assert Framing((224, 256), 256).largest(16 / 9) == (224, 256)
