"""Images: what is declared is converted, what is not declared is refused."""

import numpy as np
import pytest

from innerloop.contract import ObservationError
from innerloop.process import ImageSpec, resize_with_pad, to_frame
from innerloop.process.image import fitted_size, from_frame

RNG = np.random.default_rng(0)
FRAME = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
SPECS = [
    ImageSpec(layout, color, span)
    for layout in ("HWC", "CHW")
    for color in ("RGB", "BGR")
    for span in ("uint8", "unit")
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_declaration_gives_the_same_frame(spec: ImageSpec) -> None:
    given = from_frame(FRAME, spec)
    before = given.copy()
    frame = to_frame("base", given, spec)
    np.testing.assert_array_equal(frame, FRAME)
    assert frame.flags.c_contiguous
    assert frame.dtype == np.uint8
    np.testing.assert_array_equal(given, before)


def test_floats_on_the_grid_are_exact_in_every_width() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    for dtype in (np.float32, np.float64):
        np.testing.assert_array_equal(
            to_frame("base", every.astype(dtype) / dtype(255), ImageSpec(range="unit")), every
        )


def test_uint8_hwc_is_not_copied() -> None:
    assert np.shares_memory(to_frame("base", FRAME, ImageSpec()), FRAME)


BAD = [
    (FRAME.astype(np.float32) / 255, ImageSpec(), r"camera 'base': expected uint8, got float32; .*range='unit'"),
    (FRAME.astype(np.int32), ImageSpec(), r"expected uint8, got int32"),
    (FRAME.astype(np.float32), ImageSpec(range="unit"), r"declared as float in 0..1, but holds .*0..255"),
    (FRAME.astype(np.float32) / 255 - 0.5, ImageSpec(range="unit"), r"holds -0.5..*; rescale it"),
    (np.full((4, 4, 3), np.nan, np.float32), ImageSpec(range="unit"), r"holds NaN"),
    (FRAME, ImageSpec(range="unit"), r"declared as float in 0..1.*got uint8; declare ImageSpec\(range='uint8'\)"),
    (FRAME[None], ImageSpec(), r"expected one image of rank 3 \(HWC\), got shape \(1, 6, 8, 3\)"),
    (FRAME[..., 0], ImageSpec(), r"rank 3"),
    (FRAME.transpose(2, 0, 1), ImageSpec(), r"got shape \(3, 6, 8\); declare ImageSpec\(layout='CHW'\)"),
    (FRAME, ImageSpec(layout="CHW"), r"declare ImageSpec\(layout='HWC'\)"),
    (np.zeros((6, 8, 4), np.uint8), ImageSpec(), r"three colour channels"),
    (np.zeros((0, 8, 3), np.uint8), ImageSpec(), r"the image is empty \(0x8\)"),
    (np.zeros((1081, 1920, 3), np.uint8), ImageSpec(), r"1081x1920 .* larger than 1080x1920; resize"),
    ([[1, 2, 3]], ImageSpec(), r"expected a numpy array, got list"),
]


@pytest.mark.parametrize(("image", "spec", "message"), BAD)
def test_undeclared_images_are_refused_by_name(image: object, spec: ImageSpec, message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        to_frame("base", image, spec)


def test_an_unknown_declaration_is_refused() -> None:
    with pytest.raises(ObservationError, match="'NHWC' is not known; use one of: HWC CHW"):
        ImageSpec(layout="NHWC")  # type: ignore[arg-type]


def test_the_largest_frame_fits_in_either_orientation() -> None:
    for shape in ((1080, 1920, 3), (1920, 1080, 3)):
        assert to_frame("base", np.zeros(shape, np.uint8), ImageSpec()).shape == shape


def test_resize_keeps_the_aspect_and_pads_around_the_centre() -> None:
    white = np.ones((24, 32, 3), np.float32)
    out = resize_with_pad(white, 16, 16)
    assert fitted_size(24, 32, 16, 16) == (12, 16)
    np.testing.assert_array_equal(out[2:14], 1)
    assert not out[:2].any()
    assert not out[14:].any()
    same = RNG.random((16, 16, 3), np.float32)
    np.testing.assert_array_equal(resize_with_pad(same, 16, 16), same)


def test_resize_refuses_bytes_and_vanishing_images() -> None:
    with pytest.raises(ObservationError, match="takes float32"):
        resize_with_pad(FRAME, 16, 16)
    with pytest.raises(ObservationError, match="too thin"):
        resize_with_pad(np.ones((1, 40, 3), np.float32), 16, 16)
