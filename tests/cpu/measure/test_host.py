"""The host's benchmark times every part of a decision that the host has."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.frames import Road, frame_table
from bench.host import Case, Spin, hollow, parts, report, time_parts
from bench.timeline import table, time_line
from innerloop import engine

TINY = Path(__file__).parents[3] / "examples/checkpoints/tiny-pi05"


def test_every_part_has_its_microseconds() -> None:
    policy = engine.load(TINY, device="cpu")
    lines = report(Case.of(policy, (48, 64), 48), 0.2, 5).splitlines()
    policy.close()
    rows = [re.findall(r"[\d.]+", line.split("|", 2)[2]) for line in lines if re.search(r"\| [\d.]+ \|", line)]
    assert len(rows) == 15
    assert all(len(row) == 4 and float(row[0]) > 0 for row in rows[:13])
    for low, middle, high, share in (map(float, row) for row in rows[13:]):
        assert 0 < low <= middle <= high
        assert share == pytest.approx(100 * middle / (middle + 200), abs=0.3)  # both are rounded


def test_a_family_at_its_full_size_needs_no_weights() -> None:
    policy = hollow("groot", 2, 40)
    case = Case.of(policy, (224, 224), 160)
    figures = time_parts(parts(case), lambda: None, 2)
    policy.close()
    assert case.prepared[0].prompt_tokens == 160
    assert [value.shape for value in case.prepared[0].inputs["frames"]] == [(224 * 224 * 3,)] * 2
    assert len(figures) == 13
    assert all(min(row) > 0 for row in figures.values())


def test_a_spin_lasts_about_as_long_as_asked() -> None:
    spin = Spin(2.0)
    shortest = min((spin(), spin.spent)[1] for _ in range(20))
    assert 0.0005 < shortest < 0.008


def test_a_time_line_has_every_part_in_order_and_leaves_no_mark() -> None:
    policy = engine.load(TINY, device="cpu")
    machine = policy.runtime
    watched = (policy.processor, machine, machine._sessions, machine._windows, machine._refresh, machine._tick)
    watched += (machine._thread,)
    before = [dict(vars(owner)) for owner in watched]
    line = time_line(policy, "80x64", 48, 5)
    assert [list(vars(owner)) for owner in watched] == [list(one) for one in before]
    assert machine._tick.programs is before[-2]["programs"]
    policy.close()
    names = [part.name for part in line.parts]
    wanted = ["receive", "images ready", "hand-over to the device's thread", "compare", "staged 1", "staged 2"]
    wanted += [
        "inputs are on their way 1",
        "replay call of vision",
        "state, prompt, noise",
        "compare small inputs 3",
        "inputs are on their way 2",
    ]
    wanted += ["replay call of context", "replay call of action", "start of the read back"]
    wanted += ["hand-over to the caller", "wait for the device", "finish", "receipt, chunk"]
    assert [name for name in names if name in wanted] == wanted
    ends = [part.ends for part in line.parts]
    assert ends == sorted(ends)
    assert all(0 <= part.p10 <= part.p50 <= part.p90 for part in line.parts)
    # The parts leave nothing out; they are another pass, on cores that others may use.
    assert 0.2 * line.whole[1] < ends[-1]
    assert line.device == ()
    assert json.loads(json.dumps(line.plain()))["parts"][0]["name"] == "receive"
    assert sum(row.startswith("| ") for row in table(line).splitlines()) == 1 + len(names)


@pytest.mark.parametrize("way", ["by_torch", "unpinned", (1, False), (1, True), (2, True), (3, True)])
def test_every_way_brings_the_frames_there(way: str | tuple[int, bool]) -> None:
    frames = [np.random.default_rng(camera).integers(0, 256, 4001, dtype=np.uint8) for camera in range(3)]
    road = Road(torch.device("cpu"), [4001] * 3)
    road.shared(*way, frames) if isinstance(way, tuple) else getattr(road, way)(frames)
    assert all(np.array_equal(there.numpy(), frame) for there, frame in zip(road.target, frames, strict=True))


def test_every_way_has_its_microseconds() -> None:
    policy = engine.load(TINY, device="cpu")
    rows = frame_table(policy, (8, 8), 2, lambda: None).splitlines()[2:]
    policy.close()
    assert len(rows) == 9
    assert all(float(figure) >= 0 for row in rows for figure in row.split("|")[2:-1])
