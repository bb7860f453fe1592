"""GR00T's camera frames and instruction as one turn of a chat with Qwen3-VL."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from innerloop.contract import ObservationError
from innerloop.process.cameras import Cameras
from innerloop.process.crop import Framing
from innerloop.process.image import ImageSpec, to_frame
from innerloop.process.pipeline import Draft, Step
from innerloop.process.qwen3vl import Cut, Encoder
from innerloop.weights.fields import Fields

DEFAULT_TASK = "Perform the task."  # LeRobot 0.6.1 groot/utils.py, where there is no instruction
_PUNCTUATION = re.compile(r"[^\w\s]")


def framing(settings: Mapping[str, Any]) -> Framing:
    """From processor_kwargs; where they name no size, what the published backbone was trained on (LeRobot 0.6.1).

    Raises CheckpointError for sizes that are none.
    """
    named = settings.get("image_target_size") is not None
    usual: Mapping[str, Any] = {"image_target_size": (256, 256), "image_crop_size": (230, 230)}
    known = Fields("the processor's settings", settings if named else usual)
    tall, wide = known.counts("image_target_size", 2)
    if not tall or not wide:
        raise known.wrong("image_target_size", "a height and a width of at least one pixel")
    crop, _ = known.counts("image_crop_size", 2, (tall, wide))
    fraction, edge = known.number("crop_fraction", crop / tall), known.size("shortest_image_edge", tall)
    area, letterbox = bool(settings.get("use_albumentations")), bool(settings.get("letter_box_transform"))
    return Framing((tall, wide), edge, fraction, area, letterbox)


@dataclass(frozen=True)
class ChatStep(Step):
    """Frames in camera order, one picture a time step and camera, then the instruction."""

    cameras: Cameras
    spec: ImageSpec
    framing: Framing
    encoder: Encoder
    frames: int
    formal: bool

    def look(self, draft: Draft) -> None:
        """Writes the inputs of the vision stages. A camera that is absent has no picture in the turn."""
        matched = self.cameras.match(draft.images)
        given = [
            self._steps(name, image)
            for name, image in zip(self.cameras.names, matched, strict=True)
            if image is not None
        ]
        draft.seen = [self._cut(view[step]) for step in range(self.frames) for view in given]
        draft.inputs |= self.encoder.pictures(draft.seen)

    def forward(self, draft: Draft) -> None:
        """Writes the other inputs of blocks.qwen3_vl."""
        text = draft.prompt or DEFAULT_TASK
        text = _PUNCTUATION.sub("", text.lower()) if self.formal else text
        encoded = self.encoder.turn(draft.seen, text)
        draft.inputs |= encoded.inputs
        draft.tokens, draft.text = encoded.tokens, text

    def _cut(self, frame: np.ndarray) -> Cut:
        return self.encoder.cut(frame, self.framing.operations(*frame.shape[:2]))

    def _steps(self, name: str, image: object) -> list[np.ndarray]:
        """Checked frames, one a time step; a single one stands for all of them."""
        if not isinstance(image, np.ndarray) or image.ndim != 4:
            return [to_frame(name, image, self.spec)] * self.frames
        if len(image) != self.frames:
            raise ObservationError(
                f"camera '{name}': {len(image)} time steps were given; the checkpoint takes {self.frames}"
            )
        return [to_frame(name, one, self.spec) for one in image]
