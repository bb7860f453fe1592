"""The schema refuses what is missing, extra or of a wrong type."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy_policy import make_records

from innerloop.measure.record import SCHEMAS, load, parse
from innerloop.measure.schema import RecordError

KINDS = sorted(make_records())
COMMITTED = sorted(Path(__file__).parents[3].glob("bench/records/*.json"))


def test_there_is_a_sample_of_every_kind() -> None:
    assert sorted(SCHEMAS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_survives_its_file(kind: str, tmp_path: Path) -> None:
    record = make_records()[kind]
    record.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == record
    assert json.loads((tmp_path / "r.json").read_text())["kind"] == kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_field_is_named(kind: str) -> None:
    whole = make_records()[kind].to_json()
    for name in whole:
        with pytest.raises(RecordError, match=name):
            parse({key: value for key, value in whole.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "extra"),
        ({"p50_ms": "12"}, "p50_ms"),
        ({"p50_ms": float("nan")}, "p50_ms"),
        ({"ticks": 12.5}, "ticks"),
        ({"ticks": True}, "ticks"),
        ({"stages": {"vision": "1"}}, "stages.vision"),
        ({"kind": "unheard"}, "unheard"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse(make_records()["latency"].to_json() | change)


def test_nested_rows_are_checked() -> None:
    data = make_records()["ladder"].to_json()
    del data["rungs"][1]["launches"]
    with pytest.raises(RecordError, match=r"rungs\[1\].*launches"):
        parse(data)


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(RecordError, match="list"):
        load(tmp_path / "r.json")


def test_every_committed_record_is_valid() -> None:
    for path in COMMITTED:
        load(path)


@pytest.mark.parametrize(
    "path", [path for path in COMMITTED if "stages_roof_percent" in path.read_text()], ids=lambda path: path.stem
)
def test_no_committed_stage_is_faster_than_its_roof(path: Path) -> None:
    """Otherwise its time and its work are not of the same kernels."""
    percent = json.loads(path.read_text())["stages_roof_percent"]
    assert max(percent.values()) < 105, percent
