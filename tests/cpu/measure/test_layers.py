"""python -m bench.layers: towers run as built, and what a launch is worth is told from what it costs."""

import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from bench import harness, layers
from bench.layers import Tower
from innerloop.blocks.dit import DiTSizes
from innerloop.blocks.qwen3 import Qwen3Sizes
from innerloop.blocks.sizes import VisionSizes
from innerloop.kernels import launch
from innerloop.kernels.launch import Launch, Table

CPU = torch.device("cpu")
SMALL = VisionSizes(64, 128, 2, 4, 1, 1)
DECODER = Qwen3Sizes(width=64, depth=3, mlp_dim=96, heads=4, kv_heads=2, head_dim=16, sections=(4, 2, 2))


def _called(run: Callable[[], object]) -> Callable[[], object]:
    """In place of a graph: `run` with the launches that were forced when it would have been captured."""
    forced = dict(launch._forced)

    def replay() -> object:
        with launch.forced(forced):
            return run()

    return replay


def _elapsed(replay: Callable[[], object]) -> float:
    begun = time.perf_counter()
    replay()
    return (time.perf_counter() - begun) * 1e6


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured, and the processor's clock is read."""
    monkeypatch.setattr(harness, "captured", _called)
    monkeypatch.setattr(harness, "elapsed", _elapsed)


@pytest.mark.parametrize(
    ("builder", "shape"),
    [
        (partial(layers.head, DiTSizes(4, 16, 4, 32, interleave=True), 7, 20, False), (1, 7, 64)),
        (partial(layers.head, DiTSizes(4, 16, 4, 32, interleave=False), 7, 20, True), (1, 7, 64)),
        (partial(layers.decoder, DECODER, 9), (1, 9, 64)),
        *((partial(layers.encoder, SMALL, 2, 12, kind), (2, 12, 64)) for kind in ("siglip", "qwen3", "refiner")),
    ],
)
def test_a_tower_runs_all_its_layers(builder: Callable[[torch.device], Tower], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tower = builder(CPU)
    first = tower.run()
    assert first.shape == shape
    assert first.isfinite().all()
    assert torch.equal(first, tower.run())
    assert layers.measure("small", builder, CPU, launches=True)["tables"] > 0


def test_every_other_launch_is_tried_and_the_faster_one_told() -> None:
    """Of the ops asked for; each really is what runs in its turn."""
    tables = [Table(op, [Launch.of(1), Launch.of(2), Launch.of(4)]) for op in ("linear.whole", "norm")]

    def run() -> torch.Tensor:
        for table in tables:
            if launch.choose(table, (8,), CPU) != Launch.of(4):
                time.sleep(0.003)
        return torch.zeros(1)

    times = layers.measure("toy", lambda _: Tower(1, run), CPU, launches=True, only="linear")
    assert [name.partition(" ")[0] for name in times] == ["tables", "linear.whole", "linear.whole", "1"]
    slow, same, fast, best = times.values()
    assert max(fast, best) < 0.75 * min(slow, same)


def test_what_wins_alone_is_tried_together() -> None:
    """The best launch of each op, of those faster than the tables by more than noise."""
    a, b = ("linear.whole", (8,)), ("norm", (64,))
    choices = {
        "tables": {},
        "a1": {a: Launch.of(1)},
        "a2": {a: Launch.of(2)},
        "b1": {b: Launch.of(4)},
        "b2": {b: Launch.of(8)},
    }
    times = {"tables": 10.0, "a1": 9.0, "a2": 8.0, "b1": 9.99, "b2": 12.0}
    assert layers.together(choices, times) == {a: Launch.of(2)}


def test_a_name_that_is_no_tower_and_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["layers", "elephant"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="innerloop doctor"):
            layers.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(SystemExit, match="groot head 41"):
        layers.main()
