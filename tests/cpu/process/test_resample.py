"""Words of a frame's resizes against the host's own way, over drawn sizes; what the plan has no room for."""

import numpy as np
import pytest
import torch

from innerloop.contract import ObservationError
from innerloop.kernels.resample import HEAD, Word, reference
from innerloop.process import bicubic
from innerloop.process.crop import Framing
from innerloop.process.image import FRAME_BYTES
from innerloop.process.qwen3vl import ChatTokenizer, Encoder, ImageRules, Slots, Special
from innerloop.process.resample import Operation, Resize, Window, applied, program
from recipes.tiny import qwen

EVERYTHING = (1 << 22, 1 << 30)


def by_words(frame: np.ndarray, operations: tuple[Operation, ...]) -> np.ndarray:
    """What the reference kernel makes of the frame; a patch of one pixel keeps its order."""
    words = program(frame.shape[:2], operations, 4, EVERYTHING)
    assert words is not None
    tall, wide = words[3 * HEAD + Word.OUT_HEIGHT], words[3 * HEAD + Word.OUT_WIDTH]
    flat = torch.tensor(frame).reshape(1, -1)
    return reference.resample(flat, torch.tensor(words)[None], 4, int(tall * wide), 1, 1).numpy().reshape(tall, wide, 3)


@pytest.mark.parametrize("seed", range(40))
def test_words_give_the_bytes_of_the_host(seed: int) -> None:
    """Sizes drawn, every second seed a square; frames of noise and of black and white, where weights show most."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(1, 300, 2))
    frame = rng.integers(0, 256, (height, width if seed % 2 else height, 3), np.uint8)
    frame = frame if seed % 3 else (frame > 127).astype(np.uint8) * 255
    target, edge = rng.integers(8, 120, 2), int(rng.integers(8, 120))
    fraction, area, letterbox = float(rng.choice([1.0, 0.95, 0.7])), bool(seed % 5 < 3), bool(rng.integers(2))
    framing = Framing((int(target[0]), int(target[1])), edge, fraction, area, letterbox)
    done = framing.operations(*frame.shape[:2])
    shape = applied(done, frame).shape
    done += (Resize("bicubic", max(4, shape[0] // 8 * 8), max(4, shape[1] // 8 * 8)),)
    np.testing.assert_array_equal(by_words(frame, done), applied(done, frame))


@pytest.mark.parametrize(
    ("size", "wanted"),
    [((480, 640), (256, 341)), ((512, 512), (256, 256)), ((768, 512), (256, 256)), ((200, 700), (256, 300)), ((9, 9), (3, 3))],
)  # fmt: skip
def test_every_kind_of_area_resize(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    frame = qwen.picture(1, *size)
    done = (Resize("area", *wanted),)
    np.testing.assert_array_equal(by_words(frame, done), applied(done, frame))


@pytest.mark.parametrize("old", [1, 2, 3, 7, 100, 224, 230, 255, 257, 300, 480, 640, 1080, 1920])
def test_weights_are_those_of_torch(old: int) -> None:
    frame = (qwen.picture(2, 16, old) > 127).astype(np.uint8) * 255
    for new in (224, 230, 256, 352):
        done = (Resize("bicubic", 16, new),)
        np.testing.assert_array_equal(by_words(frame, done), bicubic.resize(frame, 16, new))


def test_windows_without_a_resize_after_them() -> None:
    frame = qwen.picture(3, 8, 12)
    inside, around = Window(2, 3, 4, 5), Window(-2, 0, 12, 12)
    np.testing.assert_array_equal(by_words(frame, (inside,)), frame[2:6, 3:8])
    np.testing.assert_array_equal(by_words(frame, (around,)), np.pad(frame, ((2, 2), (0, 0), (0, 0))))
    done = (Resize("bicubic", 6, 6), Window(-1, -1, 8, 8), Window(1, 2, 5, 5))
    np.testing.assert_array_equal(by_words(frame, done), applied(done, frame))


def test_no_words_for_what_has_no_room() -> None:
    twice = (Resize("area", 20, 20), Resize("bicubic", 16, 16))
    assert program((30, 30), twice, 1, EVERYTHING) is None
    assert program((30, 30), twice, 2, (1 << 22, 3 * 20 * 20 - 1)) is None
    words = program((30, 30), twice, 2, EVERYTHING)
    assert words is not None
    assert not words.flags.writeable
    assert program((30, 30), twice, 2, (len(words) - 1, 1 << 30)) is None


def test_the_host_does_what_the_plan_has_no_room_for() -> None:
    """Two resizes where the plan has one; and a frame that is longer than a row of the window."""
    tokenizer = ChatTokenizer(lambda text: [ord(letter) for letter in text], lambda ids: "", Special(7, 8, 9))
    rules = ImageRules(patch=4, min_pixels=1)
    once, twice = (Encoder(tokenizer, rules, Slots(1, 24, 60, resizes)) for resizes in (1, 2))
    frame, framing = qwen.picture(1, 30, 30), Framing((16, 16), 24, 0.9)
    operations = framing.operations(30, 30)
    ready, raw = once.cut(frame, operations), twice.cut(frame, operations)
    np.testing.assert_array_equal(ready.frame.reshape(16, 16, 3), framing.apply(frame))
    assert np.shares_memory(raw.frame, frame)
    assert ready.grid == raw.grid == (4, 4)
    large = np.zeros((1, FRAME_BYTES // 3 + 1, 3), np.uint8)
    assert once.cut(large, (Resize("area", 16, 24),)).frame.shape == (16 * 24 * 3,)
    with pytest.raises(ObservationError, match="40x40 becomes 10x10 patches"):
        once.cut(frame, (Resize("area", 40, 40),))
