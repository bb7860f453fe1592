"""Episodes as a moving picture: one panel a task, side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from innerloop.simulation.world import RATE, World

SIZE = 160  # pixels of a panel
EVERY = 4  # control ticks a picture
_REST = 8  # pictures of standing still at the end


class Film:
    """`watch` is given to episode.run for each episode that is to be seen; `save` writes them beside each other."""

    def __init__(self) -> None:
        self._panels: list[list[np.ndarray]] = []

    def start(self) -> None:
        """A new panel."""
        self._panels.append([])

    def watch(self, world: World, tick: int) -> None:
        """Keeps every fourth tick."""
        if tick % EVERY == 1:
            self._panels[-1].append(world.render("front", SIZE))

    def save(self, path: Path) -> None:
        """An endless GIF; panels that are over show their last picture."""
        pictures = [Image.fromarray(row) for row in _rows([panel for panel in self._panels if panel])]
        palette = pictures[0].quantize(128, dither=Image.Dither.NONE)
        reduced = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
        millis = round(1e3 * EVERY / RATE)
        reduced[0].save(path, save_all=True, append_images=reduced[1:], duration=millis, loop=0, optimize=True)


def _rows(panels: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    length = max(len(panel) for panel in panels) + _REST
    return [np.concatenate([panel[min(at, len(panel) - 1)] for panel in panels], axis=1) for at in range(length)]
