"""The kernel against the reference, and both against what the host does: bit for bit."""

import numpy as np
import pytest
import torch

from innerloop.kernels.cost import Cost
from innerloop.kernels.resample import cost, reference, resample, room
from innerloop.kernels.resample import triton as kernel
from innerloop.process.crop import Framing
from innerloop.process.qwen3vl import ImageRules
from innerloop.process.resample import applied, nothing, program

PATCH, MERGE, PATCHES, STEPS = 4, 2, 24, 3
RULES = ImageRules(PATCH, MERGE, min_pixels=1)
WAYS = {
    "bicubic": (Framing((16, 16), 16), [(14, 14), (21, 25)]),
    "bicubic twice": (Framing((16, 16), 18, 0.9), [(16, 16), (19, 12)]),
    "area": (Framing((16, 16), 16, 0.9, area=True), [(48, 48), (21, 25), (33, 40), (32, 32)]),
    "letterbox": (Framing((16, 16), 16, 0.9, area=True, letterbox=True), [(9, 11), (40, 31)]),
    "bicubic letterbox": (Framing((8, 16), 16, letterbox=True), [(12, 16)]),
}


def drawn(framing: Framing, sizes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Frames whose rest is noise, their words, and the patches that the host cuts."""
    rng = np.random.default_rng(sum(map(sum, sizes)))
    frames = rng.integers(0, 256, (len(sizes), 48 * 48 * 3), np.uint8)
    words, expected = torch.zeros(len(sizes), room(PATCHES, PATCH)[0], dtype=torch.int32), []
    for row, frame, (height, width) in zip(words, frames, sizes, strict=True):
        done = framing.operations(height, width)
        done += RULES.operations(*((done[-1].height, done[-1].width) if done else (height, width)))
        made = program((height, width), done, STEPS, room(PATCHES, PATCH))
        assert made is not None
        row[: len(made)] = torch.tensor(made)
        expected.append(RULES.patches(applied(done, frame[: height * width * 3].reshape(height, width, 3)))[0])
    return torch.from_numpy(frames), words, expected


@pytest.mark.parametrize("way", WAYS)
def test_kernel_and_reference_give_the_bytes_of_the_host(way: str) -> None:
    framing, sizes = WAYS[way]
    frames, words, expected = drawn(framing, sizes)
    for made in (reference.resample, kernel.resample):
        found = made(frames, words, STEPS, PATCHES, PATCH, MERGE)
        assert found.shape == (len(sizes), PATCHES, 3 * PATCH**2)
        for patches, wanted in zip(found.numpy(), expected, strict=True):
            np.testing.assert_array_equal(patches[: len(wanted)], wanted)
            assert not patches[len(wanted) :].any()


def test_a_slot_without_a_frame_is_zero() -> None:
    frames = torch.full((1, 3), 7, dtype=torch.uint8)
    words = torch.tensor(nothing(STEPS))[None]
    for made in (resample, kernel.resample):
        assert not made(frames, words, STEPS, PATCHES, PATCH, MERGE).any()
    assert kernel.resample(frames[:0], words[:0], STEPS, PATCHES, PATCH, MERGE).shape == (0, PATCHES, 48)


def test_cost_of_one_resize() -> None:
    assert cost.resample(1, (2, 2), (1, 1), (2, 2)) == Cost(3 * 2 * (2 * 2 + 2), 3 * (4 + 1))
