"""JPEG frames of one observation, decoded side by side.

simplejpeg and Pillow both decode by libjpeg-turbo, to the same bits; the former writes RGB at once and takes half the time.
"""

import functools
import io
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from innerloop.contract import ObservationError
from innerloop.process.image import FRAME_BYTES, MAX_HEIGHT, MAX_WIDTH
from innerloop.runtime.threads import side_by_side

Body = bytes | memoryview


def decode(bodies: Mapping[str, Body]) -> dict[str, np.ndarray]:
    """{camera: JPEG} -> {camera: uint8 [height, width, 3] RGB}. Raises ObservationError that names the camera."""
    names = list(bodies)
    return dict(zip(names, side_by_side(lambda name: _decode(name, bodies[name]), names), strict=True))


def _decode(name: str, body: Body) -> np.ndarray:
    fast = _fast()
    try:
        frame = None if fast is None else fast(name, body)
        return _with_pillow(name, body) if frame is None else frame
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ObservationError(f"camera '{name}': the frame is no readable JPEG ({error}); encode it again") from error


@functools.cache
def _fast() -> Callable[[str, Body], np.ndarray | None] | None:
    """None for a file that the strict decoder refuses: Pillow knows whether it is still a picture."""
    try:
        from simplejpeg import decode_jpeg, decode_jpeg_header
    except ImportError:
        return None

    def fast(name: str, body: Body) -> np.ndarray | None:
        try:
            height, width, _, _ = decode_jpeg_header(body)
            _check_size(name, height, width)
            frame: np.ndarray = decode_jpeg(body)
        except ValueError:
            return None
        return frame

    return fast


def _with_pillow(name: str, body: Body) -> np.ndarray:
    with Image.open(io.BytesIO(body), formats=("JPEG",)) as picture:
        _check_size(name, picture.height, picture.width)
        return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _check_size(name: str, height: int, width: int) -> None:
    if height * width * 3 > FRAME_BYTES:
        raise ObservationError(
            f"camera '{name}': {height}x{width} (height x width) is larger than {MAX_HEIGHT}x{MAX_WIDTH}; "
            "resize it before it is encoded"
        )
