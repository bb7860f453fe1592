"""Ways to bring one decision's frames from the caller's memory to the device, timed as in a decision."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from innerloop.engine import LoadedPolicy
from innerloop.runtime.threads import in_turn

COUNT = 100
WARM_UP = 10
SOURCES = 8  # sets of frames in turn, so that none lies in the nearest caches
Share = tuple[np.ndarray, np.ndarray]
Way = Callable[[Sequence[np.ndarray]], None]


class Road:
    """Staging memory and its place on the device; the device's stream must be current."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        self.cuda = device.type == "cuda"
        self.staging = [torch.zeros(size, dtype=torch.uint8, pin_memory=self.cuda) for size in sizes]
        self.target = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self.views = [staged.numpy() for staged in self.staging]

    def shared(self, cuts: int, threads: bool, frames: Sequence[np.ndarray]) -> None:
        """Copied in so many parts a frame, by this thread alone or by several; each frame leaves when it is whole."""
        parts = [part for view, frame in zip(self.views, frames, strict=True) for part in _cut(view, frame, cuts)]
        for at, _ in enumerate(in_turn(_copy, parts, threads)):
            if (at + 1) % cuts == 0:
                self.send(at // cuts)

    def by_torch(self, frames: Sequence[np.ndarray]) -> None:
        """torch's copy between tensors of the host, on its own threads."""
        for at, frame in enumerate(frames):
            self.staging[at].copy_(torch.from_numpy(frame))
            self.send(at)

    def unpinned(self, frames: Sequence[np.ndarray]) -> None:
        """The driver's own staging, from where the frame lies."""
        for target, frame in zip(self.target, frames, strict=True):
            target.copy_(torch.from_numpy(frame), non_blocking=True)

    def send(self, at: int) -> None:
        """Starts one frame on its way."""
        self.target[at].copy_(self.staging[at], non_blocking=True)

    def arrived(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()


def frame_table(policy: LoadedPolicy, frame: tuple[int, int], cameras: int, pause: Callable[[], None]) -> str:
    """Microseconds until the last copy is asked for, and until the frames are there (p10, p50, p90), as Markdown."""
    rng = np.random.default_rng(0)
    size = 3 * frame[0] * frame[1]
    sources = [[rng.integers(0, 256, size, dtype=np.uint8) for _ in range(cameras)] for _ in range(SOURCES)]
    return policy.runtime.on_device(partial(_table, policy.placement.device, sources, pause))


def _table(device: torch.device, sources: Sequence[Sequence[np.ndarray]], pause: Callable[[], None]) -> str:
    road = Road(device, [frame.size for frame in sources[0]])
    ways: dict[str, Way] = {
        "one thread": partial(road.shared, 1, False),
        "a thread a frame": partial(road.shared, 1, True),
        "frames in halves, threads": partial(road.shared, 2, True),
        "frames in thirds, threads": partial(road.shared, 3, True),
        "torch's copy": road.by_torch,
        "unpinned": road.unpinned,
    }
    one = Road(device, [sources[0][0].size])
    ways |= {
        "one frame, one thread": lambda frames: one.shared(1, False, frames[:1]),
        "one frame in halves, threads": lambda frames: one.shared(2, True, frames[:1]),
        "one frame, unpinned": lambda frames: one.unpinned(frames[:1]),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(COUNT + WARM_UP):
        for at, (name, way) in enumerate(ways.items()):
            pause()
            began = time.perf_counter_ns()
            way(sources[(turn + at) % SOURCES])
            asked = time.perf_counter_ns()
            (one if name.startswith("one frame") else road).arrived()
            taken[name].append(((asked - began) / 1e3, (time.perf_counter_ns() - began) / 1e3))
    lines = [
        "| frames to the device | asked: p10 us | p50 | p90 | there: p10 | p50 | p90 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, pairs in taken.items():
        figures = np.percentile(np.array(pairs[WARM_UP:]), (10, 50, 90), axis=0).T.reshape(-1)
        lines.append(f"| {name} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")
    return "\n".join(lines)


def _cut(view: np.ndarray, frame: np.ndarray, count: int) -> list[Share]:
    ends = [frame.size * part // count for part in range(count + 1)]
    return [(view[a:b], frame[a:b]) for a, b in pairwise(ends)]


def _copy(share: Share) -> None:
    share[0][:] = share[1]
