"""The host's benchmark times every part of a decision that the host has."""

import re
from pathlib import Path

import pytest

from bench.host import Case, Spin, hollow, parts, report, time_parts
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
        assert share == pytest.approx(100 * middle / (middle + 200), abs=0.1)


def test_a_family_at_its_full_size_needs_no_weights() -> None:
    policy = hollow("groot", 2, 40)
    case = Case.of(policy, (224, 224), 160)
    figures = time_parts(parts(case), lambda: None, 2)
    policy.close()
    assert case.prepared[0].prompt_tokens == 160
    assert [value.shape for value in case.prepared[0].inputs["pixels"]] == [(256 * 256 * 3,)] * 2
    assert len(figures) == 13
    assert all(min(row) > 0 for row in figures.values())


def test_a_spin_lasts_about_as_long_as_asked() -> None:
    spin = Spin(2.0)
    shortest = min((spin(), spin.spent)[1] for _ in range(20))
    assert 0.0005 < shortest < 0.008
