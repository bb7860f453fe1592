"""`python -m bench.resample`: what a GPU takes to bring two raw frames to patches, and what the host took for the same."""

import functools
import itertools
import math
import time

import numpy as np
import torch

from bench.harness import time_graph
from innerloop.kernels import launch
from innerloop.kernels.launch import Launch
from innerloop.kernels.resample import cost, resample, room
from innerloop.kernels.resample.triton import TABLE
from innerloop.process.crop import Framing
from innerloop.process.qwen3vl import ImageRules
from innerloop.process.resample import program

RULES, IMAGES, CAPACITY = ImageRules(), 2, 1920 * 1080 * 3
SIZES = ((224, 224), (256, 256), (480, 640), (720, 1280))
FRAMINGS = {
    "bicubic": (Framing(), 256, 1),
    "area, aspect kept": (Framing((256, 256), 256, 0.95, area=True), 448, 3),
}


def host(framing: Framing, frames: list[np.ndarray], calls: int = 20) -> float:
    """Microseconds of the host's way, the shortest of so many."""
    best = math.inf
    for _ in range(calls):
        start = time.perf_counter()
        for frame in frames:
            RULES.patches(framing.apply(frame))
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


def main() -> None:
    """A line for each framing and size: the host, and every launch of the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    for (name, (framing, patches, steps)), size in itertools.product(FRAMINGS.items(), SIZES):
        rng, done = np.random.default_rng(0), framing.operations(*size)
        made = (done[-1].height, done[-1].width) if done else size
        words = program(size, done + RULES.operations(*made), steps, room(patches, RULES.patch))
        assert words is not None
        frames = rng.integers(0, 256, (IMAGES, *size, 3), np.uint8)
        sent = torch.zeros(IMAGES, CAPACITY, dtype=torch.uint8, device=device)
        sent[:, : frames[0].size] = torch.tensor(frames).view(IMAGES, -1).to(device)
        rows = torch.tensor(words, device=device)[None].repeat(IMAGES, 1)
        times = {_short(choice): _timed(choice, sent, rows, steps, patches) for choice in TABLE.default}
        taps = (4 * max(1, size[0] // made[0]), 4 * max(1, size[1] // made[1]))
        bound = cost.resample(IMAGES, size, made, taps).bytes / 1e3
        shown = "  ".join(f"{choice} {us:.1f}" for choice, us in times.items())
        print(
            f"{name}, {IMAGES} x {size[0]}x{size[1]} ({bound:.0f} kB): host {host(framing, list(frames)):.0f} us; {shown}"
        )


def _timed(choice: Launch, frames: torch.Tensor, words: torch.Tensor, steps: int, patches: int) -> float:
    with launch.forced({("resample", (patches, RULES.patch)): choice}):
        return time_graph([functools.partial(resample, frames, words, steps, patches, RULES.patch, RULES.merge)])


def _short(choice: Launch) -> str:
    return f"{choice['ROWS']} rows, {choice.warps} warps"


if __name__ == "__main__":
    main()
