"""The whole call in seven stages, parity gates, on toy stages."""

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from toy_policy import ToySubject, toy_workload

from innerloop.measure.agreement import FigureRefused, compare
from innerloop.measure.bench import Run, bench
from innerloop.measure.clock import SEVEN, Prepared, Profiled, Workload, clock_stages
from innerloop.measure.record import LatencyRecord, parse

SLOW = {"preprocess": 0.002, "vision": 0.004, "context": 0.003, "action": 0.005, "postprocess": 0.002}


@dataclass(frozen=True)
class Other:
    """A reference that answers what the toy answers, plus `off`."""

    off: float
    name: str = "official"

    def infer(self, observation, noise) -> np.ndarray:
        subject = ToySubject()
        return subject.profile(subject.prepare(observation, noise)).outputs["actions"] + np.float32(self.off)


@pytest.fixture
def record(workload: Workload, simulated_time: None) -> LatencyRecord:
    return bench(ToySubject(SLOW), workload, Run("innerloop bench toy", ticks=40), [Other(0.0)])


def test_stages_sum_to_the_whole_call(record: LatencyRecord) -> None:
    assert tuple(record.stages) == SEVEN
    assert sum(record.stages.values()) == pytest.approx(record.p50_ms, rel=0.05)
    assert record.unattributed_ms == pytest.approx(record.p50_ms - sum(record.stages.values()))


@pytest.mark.parametrize("stage", ["preprocess", "vision", "context", "action", "postprocess"])
def test_a_slowed_stage_is_found(stage: str, workload: Workload, simulated_time: None) -> None:
    found = bench(ToySubject({stage: 0.01}), workload, Run("", ticks=12)).stages
    assert max(found, key=lambda name: found[name]) == stage


def test_reading_the_marks_counts_for_no_stage(workload: Workload, simulated_time: None) -> None:
    class Marked(ToySubject):
        def profile(self, prepared: Prepared) -> Profiled:
            profiled = super().profile(prepared)
            time.sleep(0.01)
            return replace(profiled, reading_ms=10.0)

    found = clock_stages(Marked({"postprocess": 0.002}), workload, 5)
    assert found["postprocess"] == pytest.approx([2.0] * 5, abs=0.1)


def test_host_share_and_bounds(record: LatencyRecord) -> None:
    assert record.host_share == pytest.approx(4 / 16, abs=0.01)
    assert replace(record, device_ms=record.p50_ms + 1).host_share == 0
    assert record.stages_bound["preprocess"] == record.stages_bound["postprocess"] == "host"
    assert record.stages_flops["vision"] > 0
    assert record.stages_roof_percent["vision"] > 0
    assert record.launches == sum(record.stages_launches.values()) > 0


def test_the_record_is_valid_and_names_what_it_was_compared_with(record: LatencyRecord) -> None:
    assert parse(record.to_json()) == record
    assert record.agreement["official"]["max_abs"] == 0
    assert record.against["official"] > 0
    assert (record.weights, record.views, record.frames) == ("random", 2, "32x32 raw")


def test_a_slow_policy_takes_minutes_not_hours(simulated_time: None) -> None:
    """Seven seconds a decision: twenty are kept of a thousand, four compared, and the record says what was kept."""
    compared, taken_apart = [], []

    class Slow(ToySubject):
        def interpret(self, prepared: Prepared) -> np.ndarray:
            compared.append(prepared)
            return super().interpret(prepared)

        def infer_in_parts(self, observation, noise) -> Profiled:
            taken_apart.append(noise)
            return super().infer_in_parts(observation, noise)

    record = bench(Slow({"action": 7.0}), toy_workload(9), Run("", ticks=1000))
    assert (record.ticks, len(taken_apart), len(compared)) == (20, 20, 4)
    compared.clear()
    taken_apart.clear()
    record = bench(Slow({"action": 0.04}), toy_workload(9), Run("", ticks=1000))
    assert (record.ticks, len(taken_apart), len(compared)) == (1000, 200, 9)


def test_agreement_is_of_the_worst_chunk_and_of_all_together() -> None:
    ours, theirs = [np.array([[3.0, 4.0]]), np.array([[0.0, 1.0]])], [np.array([[3.0, 4.0]]), np.array([[1.0, 0.0]])]
    found = compare(ours, theirs)
    assert (found.cosine, found.max_abs, found.largest) == (0.0, 1.0, 4.0)
    assert found.global_cosine == pytest.approx(25 / 26)
    assert found.flat()["global_cosine"] == found.global_cosine


def test_no_figure_when_the_captured_plan_differs_from_the_interpreter(workload: Workload) -> None:
    with pytest.raises(FigureRefused, match="interpreter"):
        bench(ToySubject(wrong=0.01), workload, Run("", ticks=8))


def test_no_figure_when_the_official_actions_differ(workload: Workload) -> None:
    with pytest.raises(FigureRefused, match="official"):
        bench(ToySubject(), workload, Run("", ticks=8), [Other(0.5)])
