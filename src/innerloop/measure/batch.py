"""Throughput and latency as the batch grows."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from innerloop.engine import LoadedPolicy
from innerloop.measure.clock import DEVICE_STAGES, Prepared, Workload, seventh
from innerloop.measure.distribution import Distribution, within
from innerloop.measure.record import BatchRecord, BatchRow
from innerloop.measure.subject import PolicySubject

log = logging.getLogger(__name__)

PROFILED = 50  # decisions in the pass with events between stages


def batch_curve(
    open_policy: Callable[[int], LoadedPolicy],
    sizes: Iterable[int],
    workload: Workload,
    ticks: int,
    origin: Mapping[str, Any],
) -> BatchRecord:
    """One row a size, each with a policy of its own. `origin` holds the record's other fields."""
    rows = []
    for size in sizes:
        log.info("batch of %d", size)
        policy = open_policy(size)
        rows.append(_row(PolicySubject(policy), workload, ticks))
        policy.close()
    return BatchRecord(**origin, ticks=ticks, rows=rows)


def _row(subject: PolicySubject, workload: Workload, ticks: int) -> BatchRow:
    size = subject.facts.batch
    messages = [workload.wire.pack(observation) for observation in workload.observations]
    turn = 0

    def prepare() -> list[Prepared]:
        nonlocal turn
        places = [(turn + row) % len(messages) for row in range(size)]
        turn += 1
        noises = workload.noises
        return [subject.prepare(workload.wire.unpack(messages[p]), noises[p % len(noises)]) for p in places]

    def call() -> float:
        start = time.perf_counter_ns()
        rows = prepare()
        outputs = subject.decide_batch(rows, profile=False).outputs["actions"]
        for row, actions in zip(rows, outputs, strict=True):
            subject.policy.processor.finish(actions, row.context)
        return (time.perf_counter_ns() - start) / 1e6

    times = Distribution.of(within(call, ticks).samples)
    stages: dict[str, list[float]] = {name: [] for name in DEVICE_STAGES}
    for _ in range(min(ticks, PROFILED)):
        for name, ms in _device_stages(subject, prepare()).items():
            stages[name].append(ms)
    return BatchRow(
        batch=size,
        p50_ms=times.p50,
        p99_ms=times.p99,
        per_sample_ms=times.p50 / size,
        decisions_per_s=1e3 * size / times.p50,
        stages={name: Distribution.of(ms).p50 for name, ms in stages.items()},
    )


def _device_stages(subject: PolicySubject, rows: list[Prepared]) -> dict[str, float]:
    plan = subject.plans[max(row.capacity for row in rows)]
    times = dict.fromkeys(DEVICE_STAGES, 0.0)
    for stage, ms in subject.decide_batch(rows, profile=True).stages_ms.items():
        times[seventh(plan, stage)] += ms
    return times
