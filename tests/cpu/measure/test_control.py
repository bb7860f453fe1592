"""The control-time model against a step-by-step simulation of the loop."""

import pytest

from innerloop.contract import InnerloopError
from innerloop.measure.control import ControlLoop, horizons, sweep


def loop(latency_ms: float, horizon: int = 10, chunk: int = 50, delay_ms: float = 0.0) -> ControlLoop:
    return ControlLoop(chunk, horizon, control_hz=50, environment_ms=5, delay_ms=delay_ms, latency_ms=latency_ms)


def simulate(one: ControlLoop, chunks: int = 400) -> float:
    """Actions a second of an overlapped loop: ask at a chunk's start, execute what is not yet past when it comes."""
    now = ready = 0.0
    executed = 0
    for _ in range(chunks):
        now = max(now, ready)
        ready = now + one.answer_ms
        usable = min(one.horizon, one.chunk - one.skipped)
        executed += usable
        now += usable * one.step_ms
    return 1e3 * executed / now


@pytest.mark.parametrize("latency", [5, 50, 199, 201, 350, 600])
def test_overlapped_rate_is_the_simulated_one(latency: float) -> None:
    assert loop(latency).overlapped_hz == pytest.approx(simulate(loop(latency)), rel=0.01)


def test_the_bound_flips_where_a_chunk_takes_as_long_to_come_as_to_execute() -> None:
    flip = loop(0).flip_ms
    assert flip == pytest.approx(200)  # 10 actions of 20 ms
    assert loop(flip * 0.99).bound == "environment"
    assert loop(flip * 1.01).bound == "inference"
    assert loop(flip * 0.99).overlapped_hz == pytest.approx(50)
    assert loop(flip * 1.5).overlapped_hz < 50
    assert loop(0, delay_ms=60).flip_ms == pytest.approx(140)


@pytest.mark.parametrize("horizon", [1, 3, 5, 8, 10])
def test_the_flip_is_where_the_rate_falls(horizon: int) -> None:
    flip = loop(0, horizon, chunk=10).flip_ms
    assert loop(flip, horizon, chunk=10).overlapped_hz == pytest.approx(50)
    assert loop(flip + 1, horizon, chunk=10).overlapped_hz < 49.9
    assert loop(flip + 1, horizon, chunk=10).bound == "inference"


def test_waiting_costs_the_answer_every_chunk() -> None:
    assert loop(100, delay_ms=100).synchronous_hz == pytest.approx(25)


def test_a_slow_environment_sets_the_step() -> None:
    slow = ControlLoop(10, 10, control_hz=50, environment_ms=100, delay_ms=0, latency_ms=20)
    assert slow.step_ms == 100
    assert slow.overlapped_hz == pytest.approx(10)


def test_a_chunk_that_is_past_when_it_arrives_is_waited_for() -> None:
    late = loop(900, horizon=10, chunk=10)
    assert late.skipped >= late.chunk
    assert late.overlapped_hz == late.synchronous_hz


def test_sweep_and_horizons() -> None:
    assert horizons(10) == [1, 2, 4, 8, 10]
    rows = sweep(loop(30), (0.0, 100.0), (5, 10))
    assert [(row.delay_ms, row.horizon) for row in rows] == [(0, 5), (0, 10), (100, 5), (100, 10)]
    assert rows[2].bound == "inference"


def test_a_horizon_beyond_the_chunk_is_refused() -> None:
    with pytest.raises(InnerloopError, match=r"outside 1\.\.10"):
        loop(10, horizon=11, chunk=10)
