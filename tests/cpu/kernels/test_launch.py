"""Launch tables: what cannot launch is never a candidate; tuning keeps what is measured to win."""

import dataclasses
from pathlib import Path

import pytest
import torch

from innerloop.contract.errors import InnerloopError
from innerloop.kernels import launch
from innerloop.kernels.launch import SHARED_BYTES, Launch, Limits, Shape, Table

CPU = torch.device("cpu")
SMALL, LARGE, HUGE = Launch.of(4, BYTES=1000), Launch.of(8, BYTES=150_000), Launch.of(8, BYTES=10**9)


def _bytes(choice: Launch, shape: Shape) -> int:
    return choice["BYTES"]


TABLE = Table("toy", default=[SMALL], rows={90: [HUGE, LARGE], 89: [LARGE]}, shared_bytes=_bytes)


def _limits(capability: int) -> Limits:
    return Limits("toy", capability, 100, SHARED_BYTES[capability], 1 << 25)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_tuned", {})


def test_candidates_fit_and_prefer_the_row() -> None:
    assert launch.candidates(TABLE, (1,), _limits(90)) == [LARGE, SMALL]
    assert launch.candidates(TABLE, (1,), _limits(89)) == [SMALL]
    assert launch.candidates(TABLE, (1,), _limits(120)) == [SMALL]


def test_nothing_fits_is_an_error_with_a_remedy() -> None:
    table = dataclasses.replace(TABLE, default=[HUGE], rows={})
    with pytest.raises(InnerloopError, match=r"toy.*use_kernels\('reference'\)"):
        launch.candidates(table, (1,), _limits(80))


def test_tuning_keeps_the_fastest_and_survives_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("toy", default=[SMALL, LARGE, HUGE], shared_bytes=_bytes)
    tried = []

    def measure() -> float:
        choice = launch.choose(table, (3,), CPU)
        tried.append(choice)
        return {SMALL: 5.0, LARGE: 4.0, HUGE: 4.5}[choice]

    results = launch.tune(measure, CPU)
    assert [(r.op, r.shape, r.launch, r.before_ms, r.after_ms) for r in results] == [("toy", (3,), LARGE, 5.0, 4.0)]
    assert set(tried) == {SMALL, LARGE, HUGE}
    assert launch.choose(table, (3,), CPU) == LARGE
    assert launch.choose(table, (4,), CPU) == SMALL

    path = tmp_path / "tuned.json"
    launch.save(path, results, CPU)
    launch.save(path, results, CPU)
    monkeypatch.setattr(launch, "_tuned", {})
    assert launch.choose(table, (3,), CPU) == SMALL
    assert launch.load(path, CPU) == 1
    assert launch.choose(table, (3,), CPU) == LARGE
    path.write_text(path.read_text().replace('"interpreter"', '"another device"'))
    assert launch.load(path, CPU) == 0


def test_a_gain_within_noise_changes_nothing() -> None:
    table = Table("toy", default=[SMALL, LARGE], shared_bytes=_bytes)
    assert launch.tune(lambda: {SMALL: 5.0, LARGE: 4.99}[launch.choose(table, (3,), CPU)], CPU) == []


def test_dependent_launch_is_off_unless_asked_and_able(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, able in ((89, False), (90, True)):
        monkeypatch.setattr(launch, "limits", lambda device, c=capability: _limits(c))
        assert launch.options(SMALL, CPU)["PDL"] is False
        with launch.dependent_launch():
            assert launch.options(SMALL, CPU)["PDL"] is able
            assert launch.options(SMALL, CPU)["launch_pdl"] is able


@pytest.mark.parametrize(
    ("count", "tiles"),
    [(1, (16, 0)), (16, (16, 0)), (17, (16, 16)), (41, (32, 16)), (64, (64, 0)), (132, (128, 16)), (169, (128, 64))],
)
def test_two_tiles_hold_all(count: int, tiles: tuple[int, int]) -> None:
    assert launch.two_tiles(count) == tiles
