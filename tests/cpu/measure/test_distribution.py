"""Warm-up and percentiles on simulated latencies."""

import itertools

import pytest

from innerloop.measure.distribution import FEWEST, WARMUP_LIMIT, Distribution, affordable, settle, within


def simulated(slow: float, count: int, then: float = 10.0):
    """A policy whose first `count` runs are `slow` times slower, with a 0.2 % ripple."""
    runs = itertools.count()

    def decide() -> float:
        run = next(runs)
        return then * (slow if run < count else 1.0) * (1 + 0.002 * (run % 3 - 1))

    return decide


def test_slow_first_hundred_runs_do_not_reach_the_median() -> None:
    settled = settle(simulated(1.08, 100), 1000)
    assert Distribution.of(settled.samples).p50 == pytest.approx(10.0, rel=0.01)
    assert max(settled.samples) < 10.5
    assert settled.warmup >= 100
    assert settled.stable


def test_a_long_slow_plateau_is_found_in_the_kept_samples() -> None:
    settled = settle(simulated(1.08, 400), 1000)
    assert max(settled.samples) < 10.5
    assert settled.warmup >= 400
    assert settled.stable


def test_a_machine_that_never_settles_is_reported() -> None:
    growing = itertools.count(100)
    settled = settle(lambda: 1.02 ** next(growing), 200)
    assert not settled.stable
    assert settled.warmup >= WARMUP_LIMIT


def test_percentiles() -> None:
    found = Distribution.of([float(value) for value in range(1, 101)])
    assert (found.p50, found.max, found.count) == (50.5, 100.0, 100)
    assert found.p99 == pytest.approx(99.01)
    assert found.jitter == pytest.approx(found.p99 - found.p50)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Distribution.of([])


def test_a_slow_side_is_asked_less_often_but_never_less_than_twenty_times() -> None:
    assert affordable(lambda: 10.0, 1000, seconds=10) == 1000
    assert affordable(lambda: 100.0, 1000, seconds=10) == 100
    assert affordable(lambda: 5000.0, 1000, seconds=10) == 20
    assert affordable(lambda: 5000.0, 5, seconds=10) == 5


def test_a_slow_side_is_warmed_up_shortly_and_measured_once() -> None:
    runs = itertools.count()

    def decide() -> float:
        return 330.0 * (1 + 0.05 * (next(runs) % 7))  # never settles

    found = within(decide, 1000)
    assert FEWEST <= len(found.samples) <= 30
    assert not found.stable
    assert next(runs) < 3 * FEWEST
    quick = within(simulated(1.0, 0), 100)
    assert (len(quick.samples), quick.stable) == (100, True)
