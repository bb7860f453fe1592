"""JPEG frames of one observation, decoded side by side.

simplejpeg and Pillow both decode by libjpeg-turbo, to the same bits; the former writes RGB at once and takes half the time.
"""

import functools
import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from innerloop.contract import ObservationError
from innerloop.process.image import FRAME_BYTES, MAX_HEIGHT, MAX_WIDTH

Body = bytes | memoryview
THREADS = 3  # beside the caller's own: robots have up to four cameras


def decode(bodies: Mapping[str, Body]) -> dict[str, np.ndarray]:
    """{camera: JPEG} -> {camera: uint8 [height, width, 3] RGB}. Raises ObservationError that names the camera.

    The caller decodes too: the first one, and then what no thread has begun, as on a machine whose cores are busy.
    """
    names = list(bodies)
    asked = {name: _threads().submit(_decode, name, bodies[name]) for name in names[1:]}
    frames = {}
    try:
        for name in (*names[:1], *reversed(names[1:])):
            if name not in asked or asked[name].cancel():
                frames[name] = _decode(name, bodies[name])
    finally:
        begun = {name: other for name, other in asked.items() if not other.cancel()}
        for other in begun.values():
            other.exception()  # nothing is read from the bodies any more once this returns
    frames |= {name: other.result() for name, other in begun.items()}
    return {name: frames[name] for name in names}


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


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "innerloop jpeg")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads stay behind in the parent
