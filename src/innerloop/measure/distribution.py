"""What a list of latencies says, and when it has settled enough to be quoted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 50  # decisions in one warm-up window
AGREEING_WINDOWS = 3
TOLERANCE = 0.01  # medians this close, relatively, count as equal
WARMUP_LIMIT = 20  # windows before warm-up is given up and the record says so
DRIFT_RETRIES = 2
PATIENCE = 10.0  # seconds for the kept samples of another implementation or of a slow rung
FEWEST = 20


@dataclass(frozen=True)
class Distribution:
    """Milliseconds over `count` samples; jitter is p99 minus p50."""

    p50: float
    p95: float
    p99: float
    max: float
    jitter: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Distribution":
        """Percentiles by linear interpolation. Raises ValueError without samples."""
        if not samples:
            raise ValueError("a distribution needs at least one sample")
        p50, p95, p99 = (float(value) for value in np.percentile(samples, (50, 95, 99)))
        return cls(p50=p50, p95=p95, p99=p99, max=max(samples), jitter=p99 - p50, count=len(samples))


@dataclass(frozen=True)
class Settled:
    """Samples of the steady state, the decisions thrown away before them, and whether the median was stable."""

    samples: list[float]
    warmup: int
    stable: bool


def settle(decide: Callable[[], float], ticks: int) -> Settled:
    """Run `decide` (returns its own milliseconds) until its median is stable, then keep `ticks` samples.

    Warm-up ends when the medians of three windows of fifty agree within 1 %. The kept samples are checked once
    more: when their quarters disagree the machine was still changing, and they become warm-up too.
    """
    window = min(WINDOW, max(ticks // 4, 1))
    warmup, stable = _warm(decide, window)
    samples = [decide() for _ in range(ticks)]
    for _ in range(DRIFT_RETRIES):
        if not _drifted(samples):
            return Settled(samples, warmup, stable)
        warmup += len(samples)
        samples = [decide() for _ in range(ticks)]
    return Settled(samples, warmup, stable and not _drifted(samples))


def within(decide: Callable[[], float], ticks: int, seconds: float = PATIENCE) -> Settled:
    """`settle` where `ticks` decisions fit into some seconds; else as many as do, after a short warm-up, once.

    For other implementations, slow rungs and large batches, whose figures nobody quotes to the percent.
    """
    count = affordable(decide, ticks, seconds)
    if count == ticks:
        return settle(decide, ticks)
    warmup, stable = _warm(decide, FEWEST // 4, AGREEING_WINDOWS + 1)
    return Settled([decide() for _ in range(count)], warmup, stable)


def affordable(decide: Callable[[], float], ticks: int, seconds: float = PATIENCE) -> int:
    """As many of `ticks` decisions as fit into some seconds, at least twenty: for sides that take long to decide."""
    decide()
    return fitting(float(np.median([decide() for _ in range(3)])), ticks, seconds)


def fitting(milliseconds: float, ticks: int, seconds: float = PATIENCE) -> int:
    """As many of `ticks` decisions of so many milliseconds as fit into some seconds, at least twenty."""
    return max(min(ticks, FEWEST), min(ticks, int(1e3 * seconds / max(milliseconds, 1e-3))))


def _warm(decide: Callable[[], float], window: int, limit: int = WARMUP_LIMIT) -> tuple[int, bool]:
    medians: list[float] = []
    while len(medians) < limit:
        medians.append(float(np.median([decide() for _ in range(window)])))
        if len(medians) >= AGREEING_WINDOWS and _agree(medians[-AGREEING_WINDOWS:]):
            return window * len(medians), True
    return window * len(medians), False


def _agree(medians: Sequence[float]) -> bool:
    return max(medians) <= min(medians) * (1 + TOLERANCE)


def _drifted(samples: Sequence[float]) -> bool:
    quarter = math.ceil(len(samples) / 4)
    medians = [float(np.median(samples[start : start + quarter])) for start in range(0, len(samples), quarter)]
    return not _agree(medians)
