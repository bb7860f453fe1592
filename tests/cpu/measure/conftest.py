"""A clock without time, and something to decide upon."""

import time

import pytest
from toy_policy import toy_workload

from innerloop.measure.clock import Workload


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping costs what it says and reading the clock a microsecond; nothing else takes time."""
    now = 0

    def read() -> int:
        nonlocal now
        now += 1000
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds * 1e9)

    monkeypatch.setattr(time, "perf_counter_ns", read)
    monkeypatch.setattr(time, "perf_counter", lambda: read() / 1e9)
    monkeypatch.setattr(time, "sleep", sleep)


@pytest.fixture
def workload() -> Workload:
    return toy_workload()
