"""GR00T's camera frames and instruction as one turn of a chat with Qwen3-VL."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process.cameras import Cameras
from innerloop.process.crop import Framing
from innerloop.process.image import ImageSpec, to_frame
from innerloop.process.pipeline import Draft, Step
from innerloop.process.qwen3vl import Cut, Encoder
from innerloop.runtime.threads import side_by_side

DEFAULT_TASK = "Perform the task."  # LeRobot 0.6.1 groot/utils.py, where there is no instruction
ALONE = 1 << 18  # bytes; a frame of so many is ready about as soon as another thread has woken up
_PUNCTUATION = re.compile(r"[^\w\s]")


def framing(settings: Mapping[str, Any]) -> Framing:
    """From processor_kwargs; where they name no size, what the published backbone was trained on (LeRobot 0.6.1).

    Raises CheckpointError for sizes that are none.
    """
    named = settings.get("image_target_size") is not None
    usual: Mapping[str, Any] = {"image_target_size": (256, 256), "image_crop_size": (230, 230)}
    known = settings if named else usual
    size, crop, fraction = known["image_target_size"], known.get("image_crop_size"), known.get("crop_fraction")
    edge = known.get("shortest_image_edge")
    area, letterbox = bool(settings.get("use_albumentations")), bool(settings.get("letter_box_transform"))
    try:
        tall, wide = (int(side) for side in size)
        if fraction is None:
            fraction = crop[0] / tall if crop else 1.0
        return Framing((tall, wide), int(edge or tall), float(fraction), area, letterbox)
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"the processor's image_target_size is {size!r}, image_crop_size {crop!r}, crop_fraction {fraction!r}, "
            f"shortest_image_edge {edge!r}: sizes are [height, width], the others one number ({error})"
        ) from error


@dataclass(frozen=True)
class ChatStep(Step):
    """Frames in camera order, one picture a time step and camera, then the instruction."""

    cameras: Cameras
    spec: ImageSpec
    framing: Framing
    encoder: Encoder
    frames: int
    formal: bool

    def forward(self, draft: Draft) -> None:
        """Writes the inputs of blocks.qwen3_vl. A camera that is absent has no picture in the turn."""
        matched = self.cameras.match(draft.images)
        given = [
            self._steps(name, image)
            for name, image in zip(self.cameras.names, matched, strict=True)
            if image is not None
        ]
        # One frame may stand for several time steps.
        unique = {id(frame): frame for view in given for frame in view}
        frames = list(unique.values())
        spread = side_by_side if max(frame.size for frame in frames) > ALONE else map
        cut = dict(zip(unique, spread(self._cut, frames), strict=True))
        text = draft.prompt or DEFAULT_TASK
        text = _PUNCTUATION.sub("", text.lower()) if self.formal else text
        encoded = self.encoder.join([cut[id(view[step])] for step in range(self.frames) for view in given], text)
        draft.inputs |= encoded.inputs
        draft.tokens, draft.text = encoded.tokens, text

    def _cut(self, frame: np.ndarray) -> Cut:
        return self.encoder.cut(self.framing.apply(frame))

    def _steps(self, name: str, image: object) -> list[np.ndarray]:
        """Checked frames, one a time step; a single one stands for all of them."""
        if not isinstance(image, np.ndarray) or image.ndim != 4:
            return [to_frame(name, image, self.spec)] * self.frames
        if len(image) != self.frames:
            raise ObservationError(
                f"camera '{name}': {len(image)} time steps were given; the checkpoint takes {self.frames}"
            )
        return [to_frame(name, one, self.spec) for one in image]
