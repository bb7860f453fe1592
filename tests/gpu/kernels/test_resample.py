"""Frames to patches on a CUDA device: the host's bytes, at every size, from one capture."""

import numpy as np
import pytest
import torch

from innerloop.kernels import launch, use_kernels
from innerloop.kernels.resample import HEAD, resample, room
from innerloop.process.crop import Framing
from innerloop.process.qwen3vl import ImageRules
from innerloop.process.resample import applied, nothing, program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RULES, PATCHES, STEPS, CAPACITY = ImageRules(), 512, 3, 1920 * 1080 * 3
SIZES = [
    (224, 224),
    (256, 256),
    (480, 640),
    (360, 640),
    (720, 1280),
    (1080, 1920),
    (512, 512),
    (1024, 1024),
    (100, 130),
]
FRAMINGS = {
    "bicubic": Framing(),
    "bicubic twice": Framing((256, 256), 256, 230 / 256),
    "area": Framing((256, 256), 256, 0.95, area=True),
    "letterbox": Framing((256, 256), 256, 0.95, area=True, letterbox=True),
}


class Frames:
    """Two frames on the device, and what the host makes of them."""

    def __init__(self, device: torch.device) -> None:
        self.frames = torch.zeros(2, CAPACITY, dtype=torch.uint8, device=device)
        self.words = torch.zeros(2, room(PATCHES, RULES.patch)[0], dtype=torch.int32, device=device)

    def set(self, row: int, framing: Framing, size: tuple[int, int], seed: int) -> np.ndarray:
        """Draws a frame of this size; its patches."""
        frame = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        frame = frame if seed % 2 else (frame > 127).astype(np.uint8) * 255
        done = framing.operations(*size)
        shape = applied(done, frame).shape
        words = program(size, done + RULES.operations(*shape[:2]), STEPS, room(PATCHES, RULES.patch))
        assert words is not None
        self.frames[row, : frame.size] = torch.tensor(frame.reshape(-1))
        self.words[row, : len(words)] = torch.tensor(words)
        return RULES.patches(framing.apply(frame))[0]


@pytest.fixture
def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("way", FRAMINGS)
def test_one_capture_gives_the_bytes_of_the_host(device: torch.device, way: str, rows: int) -> None:
    framing, held = FRAMINGS[way], Frames(device)
    held.set(0, framing, (224, 224), 0)
    with launch.forced({("resample", (PATCHES, RULES.patch)): launch.Launch.of(1, ROWS=rows)}):
        resample(held.frames, held.words, STEPS, PATCHES, RULES.patch, RULES.merge)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = resample(held.frames, held.words, STEPS, PATCHES, RULES.patch, RULES.merge)
    for seed, size in enumerate(SIZES):
        expected = [held.set(0, framing, size, seed), held.set(1, framing, SIZES[-1 - seed], seed + 1)]
        graph.replay()
        for found, wanted in zip(out.cpu().numpy(), expected, strict=True):
            np.testing.assert_array_equal(found[: len(wanted)], wanted, err_msg=f"{way} {size}")
            assert not found[len(wanted) :].any()


def test_dependent_launch_and_any_choice_of_kernels_give_the_same_bits(device: torch.device) -> None:
    framing, held = FRAMINGS["area"], Frames(device)
    expected = held.set(0, framing, (480, 640), 1)
    held.words[1, : STEPS * HEAD] = torch.tensor(nothing(STEPS), device=device)
    for kind in ("reference", "operators", "fused"):
        with use_kernels(kind), launch.dependent_launch():
            found = resample(held.frames, held.words, STEPS, PATCHES, RULES.patch, RULES.merge).cpu().numpy()
        np.testing.assert_array_equal(found[0, : len(expected)], expected)
        assert not found[1].any()
