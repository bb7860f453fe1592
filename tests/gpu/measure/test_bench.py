"""The clock, the counters and the ceilings on a GPU, with the shipped tiny checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from innerloop.measure.ceilings import measure_ceilings
from innerloop.measure.command import bench_command, reproduce_command
from innerloop.measure.options import BenchOptions
from innerloop.measure.record import BatchRecord, LadderRecord, LatencyRecord, Record

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TINY = Path(__file__).parents[3] / "examples/checkpoints/tiny-pi05"


def _measured(folder: Path, **more: Any) -> list[Record]:
    options = BenchOptions(str(TINY), device="cuda", prompt_tokens=60, ticks=300, **more)
    return bench_command(options, Console(), folder / "tiny.json")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return _measured(tmp_path_factory.mktemp("records"), ladder=True, batch=(1, 2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LatencyRecord:
    found = _measured(tmp_path_factory.mktemp("whole"))[0]
    assert isinstance(found, LatencyRecord)
    return found


def test_stages_sum_to_the_whole_call(whole: LatencyRecord) -> None:
    assert abs(whole.unattributed_ms) <= 0.05 * whole.p50_ms


def test_every_device_stage_launches_kernels_and_stays_under_its_roof(whole: LatencyRecord) -> None:
    for stage in ("vision", "context", "action"):
        assert whole.stages_launches[stage] > 0
        assert 0 < whole.stages_roof_percent[stage] <= 100
    assert whole.launches == sum(whole.stages_launches.values())


def test_clocks_and_versions_are_recorded(whole: LatencyRecord) -> None:
    assert {"sm_mhz", "power_w"} <= set(whole.clocks)
    assert {"cuda", "driver"} <= set(whole.versions)


def test_the_ladder_goes_down_in_launches(records: list[Record]) -> None:
    ladder = next(one for one in records if isinstance(one, LadderRecord))
    launches = [rung.launches for rung in ladder.rungs]
    assert launches[-1] < launches[0]
    assert ladder.rungs[-1].p50_ms < ladder.rungs[0].p50_ms


def test_a_batch_is_faster_a_sample(records: list[Record]) -> None:
    batch = next(one for one in records if isinstance(one, BatchRecord))
    assert batch.rows[1].per_sample_ms < batch.rows[0].per_sample_ms


def test_a_rerun_is_within_the_printed_spread(whole: LatencyRecord, tmp_path: Path) -> None:
    whole.save(tmp_path / "tiny.json")
    assert any(reproduce_command(tmp_path / "tiny.json", Console(), str(TINY)) for _ in range(2))


def test_ceilings_are_those_of_a_gpu() -> None:
    found = measure_ceilings(torch.device("cuda"))
    assert found.copy > 1e11
    assert found.matrix["bf16"] > found.matrix["fp32"]
    assert found.launch_s < found.eager_s
