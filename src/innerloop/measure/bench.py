"""One policy's figures: gated by parity, clocked as a whole and by stage, held against the machine's roof."""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from innerloop.measure import provenance
from innerloop.measure.agreement import BY_PRECISION, LOOSEST, REPLAY, Agreement, compare, require
from innerloop.measure.ceilings import Ceilings, measure_ceilings
from innerloop.measure.clock import (
    DEVICE_STAGES,
    HOST_STAGES,
    SEVEN,
    Prepared,
    Subject,
    Workload,
    clock_calls,
    clock_stages,
    seventh,
)
from innerloop.measure.cost import Cost
from innerloop.measure.distribution import PATIENCE, Distribution, Settled, fitting, within
from innerloop.measure.record import LatencyRecord
from innerloop.measure.roofline import Roof, cache_bytes, device_roof, host_roof, transfer_roof
from innerloop.runtime.windows import Value

log = logging.getLogger(__name__)

STAGE_TICKS = 200  # decisions in the pass that takes the call apart
AGAINST_TICKS = 50
PERCENTS = (*range(100), 99.1, 99.2, 99.3, 99.4, 99.5, 99.6, 99.7, 99.8, 99.9, 100)  # kept of the distribution
COMPARED = 20  # observations whose chunks are compared
FEWEST_COMPARED = 4  # where the interpreter takes long: as many as fit into PATIENCE, at least these
MINUTE = 60.0  # seconds for the kept calls, of which there are fewer than asked for where they do not fit


class Reference(Protocol):
    """Another implementation of the same policy, with the same weights."""

    @property
    def name(self) -> str:
        """What a record calls it."""
        ...

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions [chunk, width]; the whole call, from observation to a chunk on the host."""
        ...


@dataclass(frozen=True)
class Run:
    """What a record says of the run itself."""

    command: str
    ticks: int = 1000


@dataclass(frozen=True)
class StageFigures:
    """The seven stages: distributions, work, launches, roofs."""

    times: dict[str, Distribution]
    costs: dict[str, Cost]
    launches: dict[str, int]
    roofs: dict[str, Roof]


def bench(subject: Subject, workload: Workload, run: Run, against: Sequence[Reference] = ()) -> LatencyRecord:
    """Measure a policy. Raises FigureRefused when its actions are not those of its interpreter or of a reference."""
    log.info("agreement with the interpreter%s", "".join(f" and {other.name}" for other in against))
    agreement = check_parity(subject, workload, against)
    log.info("ceilings of this machine")
    ceilings = measure_ceilings(subject.device)
    log.info("warm-up, then %d whole calls, or as many as a minute holds", run.ticks)
    settled = clock_calls(subject, workload, run.ticks, MINUTE)
    log.info("stages one by one")
    apart = fitting(float(np.median(settled.samples)), min(len(settled.samples), STAGE_TICKS))
    times = clock_stages(subject, workload, apart)
    clocks = clocks_under_load(subject, workload)
    others = {other.name: time_reference(other, workload) for other in against}
    log.info("work and launches of each stage")
    stages = stage_figures(subject, workload, ceilings, times)  # last: a profiler may slow what runs after it
    facts, prepared = subject.facts, first(subject, workload)
    return LatencyRecord(
        **origin(subject, workload, run.command, clocks),
        kernels=facts.kernels,
        memory_bytes=facts.memory,
        batch=facts.batch,
        views=facts.views,
        frames=frames_of(workload),
        prompt_tokens=prepared.prompt_tokens,
        prompt_capacity=prepared.capacity,
        chunk=facts.chunk,
        steps=facts.steps,
        **_whole(settled),
        **_by_stage(stages, settled),
        ceilings=ceilings.flat(),
        agreement={name: found.flat() for name, found in agreement.items()},
        against=others,
    )


def check_parity(subject: Subject, workload: Workload, against: Sequence[Reference]) -> dict[str, Agreement]:
    """Agreement with the interpreter and every reference, by name. Raises FigureRefused."""
    pairs = list(zip(workload.observations, workload.noises, strict=False))[:COMPARED]
    ours = [subject.infer(observation, noise).normalized for observation, noise in pairs]
    interpreted = _interpreted(subject, pairs)
    found = {"interpreter": compare(ours[: len(interpreted)], interpreted)}
    require("the interpreter", found["interpreter"], REPLAY)
    for other in against:
        found[other.name] = compare(ours, [other.infer(observation, noise) for observation, noise in pairs])
        require(other.name, found[other.name], BY_PRECISION.get(subject.facts.precision, LOOSEST))
    return found


def _interpreted(subject: Subject, pairs: Sequence[tuple[Mapping[str, Any], np.ndarray]]) -> list[np.ndarray]:
    """The interpreter's chunks of the first observations."""
    began, chunks = time.perf_counter(), []
    for observation, noise in pairs:
        chunks.append(subject.interpret(subject.prepare(observation, noise)))
        if len(chunks) >= FEWEST_COMPARED and time.perf_counter() - began > PATIENCE:
            break
    return chunks


def stage_figures(
    subject: Subject, workload: Workload, ceilings: Ceilings, samples: Mapping[str, Sequence[float]]
) -> StageFigures:
    """Distribution, work, launches and roof of every stage."""
    times = {name: Distribution.of(ms) for name, ms in samples.items()}
    prepared = first(subject, workload)
    plan = subject.plans[prepared.capacity]
    costs = dict.fromkeys(SEVEN, Cost())
    for stage, cost in subject.costs(prepared).items():
        costs[seventh(plan, stage)] += cost
    launches = dict.fromkeys(SEVEN, 0)
    for stage, count in subject.launches(prepared).items():
        launches[seventh(plan, stage)] += count
    moved = sum(_bytes(value) for value in prepared.inputs.values())
    costs["transfer"] = Cost(bytes=moved, unique_bytes=moved)
    rate = subject.facts.precision if subject.facts.precision in ceilings.matrix else subject.facts.dtype
    cache = cache_bytes(subject.device)
    roofs = dict.fromkeys(SEVEN, host_roof())
    roofs["transfer"] = transfer_roof(moved, times["transfer"].p50, ceilings)
    for name in DEVICE_STAGES:
        roofs[name] = device_roof(costs[name], launches[name], times[name].p50, ceilings, rate, cache)
    return StageFigures(times, costs, launches, roofs)


def clocks_under_load(subject: Subject, workload: Workload) -> dict[str, float]:
    """Clocks, power and temperature while the policy decides."""
    pairs = itertools.cycle(zip(workload.observations, workload.noises, strict=True))
    return provenance.clocks(subject.device, lambda: subject.infer(*next(pairs)))


def time_reference(other: Reference, workload: Workload) -> float:
    """p50 milliseconds of another implementation's whole call, warmed up by the same rule."""
    log.info("%s: warm-up and whole calls", other.name)
    turn = 0

    def call() -> float:
        nonlocal turn
        place = turn % len(workload.observations)
        turn += 1
        start = time.perf_counter_ns()
        other.infer(workload.observations[place], workload.noises[place % len(workload.noises)])
        return (time.perf_counter_ns() - start) / 1e6

    return Distribution.of(within(call, AGAINST_TICKS).samples).p50


def origin(subject: Subject, workload: Workload, command: str, clocks: dict[str, float]) -> dict[str, Any]:
    """The fields of record.PolicyRecord."""
    facts = subject.facts
    return {
        "policy": facts.policy,
        "weights": facts.weights,
        "dtype": facts.dtype,
        "precision": facts.precision,
        "fingerprint": facts.fingerprint,
        "inputs": provenance.inputs_digest(workload.observations, workload.noises),
        **provenance.machine(subject.device, command, clocks),
    }


def first(subject: Subject, workload: Workload) -> Prepared:
    """The first observation, preprocessed."""
    return subject.prepare(workload.observations[0], workload.noises[0])


def frames_of(workload: Workload) -> str:
    """Width, height and wire format of the first frame."""
    height, width = next(iter(workload.observations[0]["images"].values())).shape[:2]
    return f"{width}x{height} {workload.wire.name}"


def _bytes(value: Value) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else sum(row.nbytes for row in value)


def _whole(settled: Settled) -> dict[str, Any]:
    whole = Distribution.of(settled.samples)
    return {
        "p50_ms": whole.p50,
        "p95_ms": whole.p95,
        "p99_ms": whole.p99,
        "max_ms": whole.max,
        "jitter_ms": whole.jitter,
        "quantiles_ms": {f"{p:g}": round(float(np.percentile(settled.samples, p)), 4) for p in PERCENTS},
        "ticks": whole.count,
        "warmup": settled.warmup,
        "settled": settled.stable,
    }


def _by_stage(figures: StageFigures, settled: Settled) -> dict[str, Any]:
    times, costs, roofs = figures.times, figures.costs, figures.roofs
    host = sum(times[name].p50 for name in HOST_STAGES)
    device = sum(times[name].p50 for name in DEVICE_STAGES)
    return {
        "launches": sum(figures.launches.values()),
        "stages": {name: times[name].p50 for name in SEVEN},
        "stages_p95_ms": {name: times[name].p95 for name in SEVEN},
        "stages_p99_ms": {name: times[name].p99 for name in SEVEN},
        "stages_max_ms": {name: times[name].max for name in SEVEN},
        "stages_jitter_ms": {name: times[name].jitter for name in SEVEN},
        "stages_launches": figures.launches,
        "stages_flops": {name: costs[name].flops for name in SEVEN},
        "stages_bytes": {name: costs[name].bytes for name in SEVEN},
        "stages_floor_ms": {name: roofs[name].floor_ms for name in SEVEN},
        "stages_roof_percent": {name: roofs[name].percent for name in SEVEN},
        "stages_bound": {name: roofs[name].bound for name in SEVEN},
        "host_ms": host,
        "device_ms": device,
        "unattributed_ms": float(np.median(settled.samples)) - host - device,
    }
