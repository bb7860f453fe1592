"""GR00T's way from a camera frame to the picture its processor sees: square padding, resize, centre crop, resize again."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from innerloop.process.resample import Operation, Resize, Window, applied


@dataclass(frozen=True)
class Framing:
    """processor_config.json of GR00T N1.7: image_target_size, shortest_image_edge, crop_fraction, letter_box_transform.

    area: cv2's area resize with the aspect kept (`use_albumentations`); else antialiased bicubic to the target's shape.
    """

    target: tuple[int, int] = (256, 256)
    edge: int = 256
    fraction: float = 1.0
    area: bool = False
    letterbox: bool = False

    def operations(self, height: int, width: int) -> tuple[Operation, ...]:
        """What is done to a frame of this size, in order."""
        done: list[Operation] = []
        if self.letterbox and height != width:
            side = max(height, width)
            done.append(Window(-((side - height) // 2), -((side - width) // 2), side, side))
            height, width = side, side
        for step in (self._first, self._middle, self._second):
            found = step(height, width)
            if found is not None:
                done.append(found)
                height, width = found.height, found.width
        return tuple(done)

    def apply(self, frame: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> uint8; the bytes of LeRobot 0.6.1 processor_groot.py."""
        return applied(self.operations(*frame.shape[:2]), frame)

    @property
    def resizes(self) -> int:
        """How many resizes there may be."""
        again = 0.0 < self.fraction < 1.0 or (not self.area and (self.edge, self.edge) != self.target)
        return 1 + again

    def refitted(self, fitted: Callable[[int, int], tuple[int, int]]) -> bool:
        """Whether `fitted` changes the size of a picture once more; of one whose aspect is kept it may."""
        return (self.area and not self.letterbox) or fitted(*self._fixed()) != self._fixed()

    def largest(self, aspect: float) -> tuple[int, int]:
        """Height and width of what `apply` gives for frames up to so many times as wide as high."""
        return (self.edge, round(self.edge * aspect)) if self.area and not self.letterbox else self._fixed()

    def _fixed(self) -> tuple[int, int]:
        return (self.edge, self.edge) if self.area else self.target

    def _first(self, height: int, width: int) -> Operation | None:
        if self.area:
            return _to_edge(height, width, self.edge)
        return None if (height, width) == (self.edge, self.edge) else Resize("bicubic", self.edge, self.edge)

    def _middle(self, height: int, width: int) -> Operation | None:
        if not 0.0 < self.fraction < 1.0:
            return None
        whole: Callable[[float], int] = int if self.area else round
        tall, wide = max(1, whole(height * self.fraction)), max(1, whole(width * self.fraction))
        return Window((height - tall) // 2, (width - wide) // 2, tall, wide)

    def _second(self, height: int, width: int) -> Operation | None:
        if self.area:
            return _to_edge(height, width, self.edge)
        return None if (height, width) == self.target else Resize("bicubic", *self.target)


def _to_edge(height: int, width: int, edge: int) -> Operation | None:
    """The shorter side at `edge`, the aspect kept."""
    if min(height, width) == edge:
        return None
    scale = edge / min(height, width)
    return Resize("area", max(1, round(height * scale)), max(1, round(width * scale)))
