"""Camera frames: what the caller declares, checked and turned into uint8 HWC RGB."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from innerloop.contract import ObservationError

MAX_HEIGHT, MAX_WIDTH = 1080, 1920
FRAME_BYTES = MAX_HEIGHT * MAX_WIDTH * 3  # one row of the `frames` window


@dataclass(frozen=True)
class ImageSpec:
    """How the caller's images are laid out. Anything but uint8 HWC RGB has to be declared."""

    layout: Literal["HWC", "CHW"] = "HWC"
    color: Literal["RGB", "BGR"] = "RGB"
    range: Literal["uint8", "unit"] = "uint8"

    def __post_init__(self) -> None:
        for value, allowed in ((self.layout, "HWC CHW"), (self.color, "RGB BGR"), (self.range, "uint8 unit")):
            if value not in allowed.split():
                raise ObservationError(f"image declaration '{value}' is not known; use one of: {allowed}")


def to_frame(name: str, image: object, spec: ImageSpec) -> np.ndarray:
    """uint8 [height, width, 3] RGB, C-contiguous; may share the caller's memory and is only to be read.

    Floats in [0, 1] go to the uint8 grid (exact for k/255). Raises ObservationError on anything undeclared.
    """
    if not isinstance(image, np.ndarray):
        raise ObservationError(f"camera '{name}': expected a numpy array, got {type(image).__name__}; convert it first")
    if image.ndim != 3:
        raise ObservationError(
            f"camera '{name}': expected one image of rank 3 ({spec.layout}), got shape {image.shape}; "
            "pass a single frame without a batch dimension"
        )
    _check_channels(name, image, spec)
    _check_dtype(name, image, spec)
    if spec.layout == "CHW":
        image = image.transpose(1, 2, 0)
    _check_size(name, image.shape[0], image.shape[1])
    if spec.range == "unit":
        image = _to_grid(name, image)
    if spec.color == "BGR":
        image = image[..., ::-1]
    return np.ascontiguousarray(image)


def from_frame(frame: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """The inverse of `to_frame`: uint8 [height, width, 3] RGB as the declared layout, colour order and range."""
    image = frame[..., ::-1] if spec.color == "BGR" else frame
    if spec.layout == "CHW":
        image = image.transpose(2, 0, 1)
    if spec.range == "unit":
        image = image.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(image)


def fitted_size(height: int, width: int, target_height: int, target_width: int) -> tuple[int, int]:
    """Height and width after a resize that keeps the aspect ratio (openpi and LeRobot round down)."""
    ratio = max(width / target_width, height / target_height)
    return int(height / ratio), int(width / ratio)


def resize_with_pad(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """float32 [H, W, C] in [0, 1] -> [height, width, C]: bilinear, aspect kept, black centred padding.

    The numbers of LeRobot 0.6.1 `resize_with_pad_torch` (pi0, pi05): no antialiasing, pixel centres at half integers.
    """
    if image.dtype != np.float32:
        raise ObservationError(f"resize_with_pad takes float32 in [0, 1], got {image.dtype}; divide uint8 by 255 first")
    fit_height, fit_width = fitted_size(image.shape[0], image.shape[1], height, width)
    if min(fit_height, fit_width) < 1:
        raise ObservationError(f"an image of {image.shape[0]}x{image.shape[1]} is too thin for {height}x{width}")
    resized = _interpolate(_interpolate(image, fit_height, 0), fit_width, 1)
    top, left = (height - fit_height) // 2, (width - fit_width) // 2
    out = np.zeros((height, width, image.shape[2]), np.float32)
    out[top : top + fit_height, left : left + fit_width] = np.clip(resized, 0.0, 1.0)
    return out


def resize_bytes_with_pad(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3] -> [height, width, 3]: aspect kept, black centred padding, antialiased where it shrinks.

    The bytes of openpi's host resize (openpi_client/image_tools.py, Pillow bilinear); a frame that fits is returned.
    """
    if frame.shape[:2] == (height, width):
        return frame
    fit_height, fit_width = fitted_size(frame.shape[0], frame.shape[1], height, width)
    resized = Image.fromarray(frame).resize((fit_width, fit_height), Image.Resampling.BILINEAR)
    top, left = (height - fit_height) // 2, (width - fit_width) // 2
    out = np.zeros((height, width, 3), np.uint8)
    out[top : top + fit_height, left : left + fit_width] = np.asarray(resized)
    return out


def _interpolate(image: np.ndarray, size: int, axis: int) -> np.ndarray:
    old = image.shape[axis]
    # The scale is a float32 in torch; its product with the pixel centre is rounded once, as by a fused multiply-add.
    exact = (np.arange(size) + 0.5) * float(np.float32(old / size)) - 0.5
    position = np.maximum(exact, 0.0).astype(np.float32)
    low = np.minimum(position.astype(np.int64), old - 1)
    high = np.minimum(low + 1, old - 1)
    shape = [1, 1, 1]
    shape[axis] = size
    weight = (position - low.astype(np.float32)).reshape(shape)
    below: np.ndarray = np.take(image, low, axis) * (1 - weight)
    blended: np.ndarray = below + np.take(image, high, axis) * weight
    return blended


def _check_channels(name: str, image: np.ndarray, spec: ImageSpec) -> None:
    axis = 2 if spec.layout == "HWC" else 0
    if image.shape[axis] == 3:
        return
    other = "CHW" if spec.layout == "HWC" else "HWC"
    looks_other = image.shape[2 - axis] == 3
    remedy = f"declare ImageSpec(layout='{other}')" if looks_other else "convert it to three colour channels"
    raise ObservationError(
        f"camera '{name}': expected 3 channels in axis {axis} ({spec.layout}), got shape {image.shape}; {remedy}"
    )


def _check_dtype(name: str, image: np.ndarray, spec: ImageSpec) -> None:
    if spec.range == "uint8" and image.dtype != np.uint8:
        remedy = "convert it to uint8 in 0..255"
        if image.dtype.kind == "f":
            remedy += ", or declare ImageSpec(range='unit') if it is float in 0..1"
        raise ObservationError(f"camera '{name}': expected uint8, got {image.dtype}; {remedy}")
    if spec.range == "unit" and image.dtype.kind != "f":
        raise ObservationError(
            f"camera '{name}': declared as float in 0..1 (range='unit'), got {image.dtype}; "
            "declare ImageSpec(range='uint8') for bytes"
        )


def _check_size(name: str, height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ObservationError(f"camera '{name}': the image is empty ({height}x{width}); check the camera")
    if height * width * 3 > FRAME_BYTES:
        raise ObservationError(
            f"camera '{name}': {height}x{width} (height x width) is larger than {MAX_HEIGHT}x{MAX_WIDTH}; "
            "resize it before the call"
        )


def _to_grid(name: str, image: np.ndarray) -> np.ndarray:
    low, high = float(image.min()), float(image.max())
    if not (low >= 0.0 and high <= 1.0):
        seen = "NaN" if low != low or high != high else f"{low:g}..{high:g}"
        remedy = "it looks like float in 0..255: divide by 255 or convert to uint8" if high > 1.0 else "rescale it"
        raise ObservationError(f"camera '{name}': declared as float in 0..1, but holds {seen}; {remedy}")
    grid: np.ndarray = np.rint(image * image.dtype.type(255)).astype(np.uint8)
    return grid
