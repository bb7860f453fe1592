"""python -m bench.policies: what is measured, and a case that fails among others."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import policies
from innerloop.contract import InnerloopError
from innerloop.measure.options import BenchOptions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the records asked for; those with three cameras fail, the others are written."""
    names: list[str] = []

    def pretend(options: BenchOptions, out: Console, place: Path) -> None:
        names.append(place.name)
        if options.views == 3:
            raise InnerloopError("actions differ from [the interpreter]")
        place.write_text("{}")

    monkeypatch.setattr(policies, "bench_command", pretend)
    return names


def test_a_case_that_fails_is_printed_and_the_next_one_goes_on(asked: list[str], tmp_path: Path) -> None:
    out = Console(record=True, quiet=True, width=200)
    failed = policies.measure("pi0", tmp_path, out)
    assert failed == [name for name in asked if "3cam" in name]
    assert 0 < len(failed) < len(asked)
    assert asked[-1] not in failed


def test_every_family_is_measured_with_each_number_of_cameras() -> None:
    for family in policies.FAMILIES:
        found = dict(policies.cases(family, (), 1000))
        assert {case.views for case in found.values()} == {1, 2, 3}
        usual = found[f"{family}.json"]
        assert (usual.ladder, usual.batch[-1:]) == ((False, ()) if family == "starvla-fast" else (True, (32,)))
        assert usual.control
        assert usual.profile


def test_the_exit_status_tells_and_what_is_there_is_not_measured_again(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policies", "pi0", "--out", str(tmp_path), "--only", "48tok"])
    with pytest.raises(SystemExit, match="1"):
        policies.main()
    first = list(asked)
    assert "actions differ from [the interpreter]" in capsys.readouterr().out
    asked.clear()
    with pytest.raises(SystemExit):
        policies.main()
    assert asked == [name for name in first if "3cam" in name]
    for name in asked:
        (tmp_path / name).write_text("{}")
    policies.main()


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve beside records that stay as they are; a whole call without the other implementation, with its own records."""
    asked: list[BenchOptions] = []

    def pretend(options: BenchOptions, out: Console, place: Path) -> None:
        asked.append(options)
        for path in policies.written(place, options):
            path.write_text(json.dumps({"against": dict.fromkeys(options.against, 1.0), "run": len(asked)}))

    def measure(*against: str) -> BenchOptions:
        policies.measure("groot", tmp_path, Console(quiet=True), "groot.json", against)
        return asked[-1]

    monkeypatch.setattr(policies, "bench_command", pretend)
    whole = measure()
    assert (whole.ladder, whole.control, whole.profile, len(whole.batch)) == (True, True, True, 6)
    (tmp_path / "groot-batch.json").unlink()
    curve = measure()
    assert (curve.ladder, curve.control, curve.profile, len(curve.batch)) == (False, False, False, 6)
    beside = measure("lerobot")
    assert (beside.ladder, beside.control, beside.profile, beside.batch) == (False, True, True, ())
    assert beside.against == ("lerobot",)
    assert measure("lerobot") is beside
    runs = {path.stem: json.loads(path.read_text())["run"] for path in tmp_path.glob("*.json")}
    assert runs == {"groot": 3, "groot-control": 3, "groot-kernels": 3, "groot-batch": 2, "groot-ladder": 1}
