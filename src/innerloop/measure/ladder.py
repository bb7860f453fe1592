"""The same decisions through ever more of the machinery: what each part of it saves."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from innerloop.measure.agreement import BY_PRECISION, LOOSEST, Agreement, Decide, compare, require
from innerloop.measure.bench import COMPARED
from innerloop.measure.clock import Workload
from innerloop.measure.distribution import Distribution, within
from innerloop.measure.record import LadderRecord, Rung

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contender:
    """A way to decide that is open, and a count of the kernels it launches."""

    decide: Decide
    launches: Callable[[], int]


Opener = Callable[[], AbstractContextManager[Contender]]


@dataclass(frozen=True)
class Step:
    """A named rung, opened only while it is measured, so that rungs do not share device memory."""

    name: str
    open: Opener


@dataclass(frozen=True)
class _Measured:
    name: str
    times: Distribution
    launches: int
    chunks: list[np.ndarray]


def climb(
    steps: Iterable[Step], workload: Workload, ticks: int, precision: str, origin: Mapping[str, Any]
) -> LadderRecord:
    """Measure every rung. `origin` holds the record's other fields. Raises FigureRefused where a rung's actions differ.

    Agreement is with the first rung: the official implementation, where there is one.
    """
    measured = [_measure(step, workload, ticks) for step in steps]
    return LadderRecord(**origin, ticks=ticks, rungs=_rungs(measured, precision))


def _measure(step: Step, workload: Workload, ticks: int) -> _Measured:
    log.info("ladder: %s", step.name)
    pairs = list(zip(workload.observations, workload.noises, strict=True))
    with step.open() as contender:
        chunks = [contender.decide(*pair) for pair in pairs[:COMPARED]]
        turn = 0

        def call() -> float:
            nonlocal turn
            pair = pairs[turn % len(pairs)]
            turn += 1
            start = time.perf_counter_ns()
            contender.decide(*pair)
            return (time.perf_counter_ns() - start) / 1e6

        times = Distribution.of(within(call, ticks).samples)
        return _Measured(step.name, times, contender.launches(), chunks)


def _rungs(measured: Sequence[_Measured], precision: str) -> list[Rung]:
    whole = measured[0].times.p50 - measured[-1].times.p50
    rungs = []
    for place, one in enumerate(measured):
        found = Agreement(1.0, 0.0, 0.0, 1.0) if place == 0 else compare(one.chunks, measured[0].chunks)
        require(measured[0].name, found, BY_PRECISION.get(precision, LOOSEST))
        saved = measured[place - 1].times.p50 - one.times.p50 if place else 0.0
        rungs.append(
            Rung(
                name=one.name,
                p50_ms=one.times.p50,
                p99_ms=one.times.p99,
                launches=one.launches,
                saved_ms=saved,
                share=saved / whole if whole else 0.0,
                cosine=found.cosine,
                max_abs=found.max_abs,
            )
        )
    return rungs
