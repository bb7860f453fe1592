"""The benchmark's time line of real decisions on the device."""

from pathlib import Path

import pytest
import torch

import innerloop
from bench.timeline import time_line

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TINY = Path(__file__).parents[3] / "examples/checkpoints/tiny-pi05"


def test_the_devices_marks_are_in_order_and_the_wait_ends_after_them() -> None:
    policy = innerloop.load(TINY, device="cuda")
    line = time_line(policy, "320x240", 48, 20)
    policy.close()
    names = [part.name for part in line.device]
    assert names[:2] == ["inputs on the device 1", "end of vision"]  # before the small inputs
    assert names[-2:] == ["outputs on the host", "the host's wait ends"]
    ends = [part.ends for part in line.device]
    assert ends[:-1] == sorted(ends[:-1])
    assert ends[-1] > ends[-2] - 20  # the two clocks are tied to some microseconds
    assert line.parts[-1].ends < 1.5 * line.whole[1]
