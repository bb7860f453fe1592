"""JPEG frames: both decoders give the same bits, whatever else the file is, and a bad one names its camera."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from innerloop.contract import ObservationError
from innerloop.process import jpeg

simplejpeg = pytest.importorskip("simplejpeg")


def picture(height: int = 48, width: int = 64) -> np.ndarray:
    rng = np.random.default_rng(height)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def encoded(frame: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG", **options)
    return file.getvalue()


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Pillow":
        monkeypatch.setattr(jpeg, "_fast", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("options", [{"quality": q, "subsampling": s} for q in (40, 90, 100) for s in (0, 1, 2)])
@pytest.mark.parametrize("size", [(48, 64), (47, 61), (480, 640), (1, 1)])
def test_the_bits_are_pillows(decoder: str, size: tuple[int, int], options: dict[str, int]) -> None:
    bodies = {"a": encoded(picture(*size), **options), "b": encoded(picture(*size)[::-1], **options)}
    for name, frame in jpeg.decode({n: memoryview(body) for n, body in bodies.items()}).items():
        assert (frame.dtype, frame.shape) == (np.uint8, (*size, 3))
        with Image.open(io.BytesIO(bodies[name])) as expected:
            np.testing.assert_array_equal(frame, np.asarray(expected))


def test_other_kinds_of_jpeg_become_rgb(decoder: str) -> None:
    grey = encoded(picture()[..., 0])
    progressive = encoded(picture(), progressive=True)
    frames = jpeg.decode({"grey": grey, "progressive": progressive, "padded": progressive + b"\0" * 40})
    assert all(frame.shape == (48, 64, 3) for frame in frames.values())
    assert np.array_equal(frames["grey"][..., 0], frames["grey"][..., 2])
    assert np.array_equal(frames["progressive"], frames["padded"])


@pytest.mark.parametrize("camera", ["first", "second"])
def test_a_bad_frame_names_its_camera(decoder: str, camera: str) -> None:
    good = encoded(picture())
    png = io.BytesIO()
    Image.fromarray(picture()).save(png, format="PNG")
    for bad in (b"", b"nonsense", good[: len(good) // 2], png.getvalue()):
        with pytest.raises(ObservationError, match=f"camera '{camera}': the frame is no readable JPEG"):
            jpeg.decode({"first": good, "second": good} | {camera: bad})
    with pytest.raises(ObservationError, match=f"camera '{camera}': 2000x1921 .* is larger than 1080x1920"):
        jpeg.decode({"first": good, "second": good} | {camera: encoded(np.zeros((2000, 1921, 3), np.uint8))})


def test_no_frames_are_no_frames() -> None:
    assert jpeg.decode({}) == {}


def test_a_forked_process_decodes_with_threads_of_its_own() -> None:
    code = (
        "import os, sys\n"
        "from innerloop.process import jpeg\n"
        "bodies = dict.fromkeys('ab', bytes.fromhex(sys.argv[1]))\n"
        "jpeg.decode(bodies)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(len(jpeg.decode(bodies)))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code, encoded(picture()).hex()], check=True, timeout=60)
