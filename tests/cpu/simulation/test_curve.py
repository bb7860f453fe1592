"""Success against delay as a chart: in the page of records, and as a picture for the documents."""

import dataclasses
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from toy_policy import make_records

from innerloop.measure import page
from innerloop.measure.record import SuccessRecord
from recipes.demo_policy import curve


def records(*delays: float) -> list[SuccessRecord]:
    """Two modes at each delay; the slower, the worse."""
    one: Any = make_records()["success"]
    return [
        dataclasses.replace(one, mode=mode, delay_ms=delay, success=0.9 - share * delay)
        for mode, share in (("realtime", 0.0005), ("synchronous", 0.001))
        for delay in delays
    ]


def drawn(text: str) -> list[list[tuple[float, float]]]:
    """The points of each curve, in pixels."""
    lines = [part.split('"', 1)[0] for part in text.split('line" points="')[1:]]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in lines]


def test_the_page_has_a_curve_where_there_is_more_than_one_delay() -> None:
    text = page.render(records(200.0, 0.0, 100.0))
    assert "Success against delay: toy" in text
    held, waiting = drawn(text)
    assert [x for x, _ in held] == sorted(x for x, _ in held)
    assert held[0] == waiting[0]
    assert held[2][1] < waiting[2][1]  # pixels run downwards
    assert "realtime, 5 actions, 100 ms: 97 of 100, 92% to 99%" in text
    assert "Success against delay" not in page.render(records(100.0))


def test_the_picture_for_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for number, one in enumerate(records(0.0, 400.0)):
        paths.append(tmp_path / f"{number}.json")
        one.save(paths[-1])
    picture = tmp_path / "success.svg"
    monkeypatch.setattr(sys, "argv", ["curve", str(picture), *map(str, paths)])
    curve.main()
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(drawn(picture.read_text())) == 2
    dataclasses.replace(records(0.0)[0], inputs="other episodes").save(paths[0])
    with pytest.raises(SystemExit, match="one set of tasks and seeds"):
        curve.main()
