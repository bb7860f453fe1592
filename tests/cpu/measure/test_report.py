"""Tables and the page from records; the page is drawn in a browser where there is one."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_policy import make_records

from innerloop.contract import InnerloopError
from innerloop.measure import page, plots, report, svg
from innerloop.measure.record import LatencyRecord

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_every_kind_has_its_table() -> None:
    text = report.markdown(list(make_records().values()))
    for title in ("Whole call", "Stages", "Ladder", "Batch", "Control time", "What changed", "Capsules", "Operators"):
        assert f"## {title}\n" in text
    assert "| toy | Imaginary GPU | bf16 | fused | 2 x 640x480 jpeg | 48 of 64 | 10 | 10 | 1 | **11.70** |" in text
    assert "| 295.6 | 25.3x | 0.999950 | 0.999900 |" in text
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.split("## Stages")[0].splitlines() if "|" in line}
    assert len(widths) == 1


def test_tables_go_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text(f"# Title\n\nprose\n\n{report.BEGIN}\nold\n{report.END}\nmore\n")
    report.write_between_markers(path, "new\n")
    report.write_between_markers(path, "newer\n")
    text = path.read_text()
    assert text.startswith("# Title\n\nprose\n")
    assert text.endswith("more\n")
    assert "newer" in text
    assert "old" not in text


def test_a_document_without_markers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text("prose")
    with pytest.raises(InnerloopError, match="records: begin"):
        report.write_between_markers(path, "tables")
    assert path.read_text() == "prose"


def test_numbers_have_three_digits() -> None:
    assert [svg.number(value) for value in (0, 0.01234, 1.5, 11.7, 295.6, 13413)] == [
        *("0", "0.0123", "1.5", "11.7", "296", "13,413"),
    ]


def test_the_page_fetches_nothing_and_holds_every_plot() -> None:
    text = page.render(list(make_records().values()))
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    for title in ("by stage", "Latency distribution", "Roofline", "ladder", "Throughput", "Control-time"):
        assert re.search(f'aria-label="[^"]*{title}', text), title


def test_a_slow_policy_has_a_chart_of_its_own() -> None:
    """Beside a call of 397 ms the stages of one of 9.7 ms cannot be seen; every record is in one chart, in its order."""
    record = make_records()["latency"]
    assert isinstance(record, LatencyRecord)
    calls = [replace(record, policy=f"p{i}", p50_ms=ms) for i, ms in enumerate((9.7, 397.0, 4.5, 14.6, 60.0, 383.0))]
    groups = [[one.policy for one in group] for group in plots.by_scale(calls)]
    assert groups == [["p0", "p2", "p3"], ["p1", "p4", "p5"]]
    text = page.render(calls)
    assert text.count("Milliseconds a decision by stage") == 2
    assert "Latency distribution" not in text
    alike = page.render([replace(record, policy=f"p{i}") for i in range(6)])
    assert alike.count("Milliseconds a decision by stage") == 1
    assert "Latency distribution" in alike


def test_slow_calls_of_many_records_are_told_in_per_cent_of_their_own_p50() -> None:
    record = make_records()["latency"]
    assert isinstance(record, LatencyRecord)
    one = replace(record, policy="steady", p50_ms=10.0, p95_ms=10.2, p99_ms=10.5, max_ms=13.0)
    text = page.render([one, *(replace(record, policy=f"p{i}") for i in range(6))])
    assert re.search(r"steady [^<]*: p95 2 % longer", text)
    assert re.search(r"steady [^<]*: longest 25 % longer", text)
    assert "p99 +5.0, longest +30.0" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn(scheme: str, tmp_path: Path) -> None:
    source, picture = tmp_path / "page.html", tmp_path / "page.png"
    source.write_text(page.render(list(make_records().values())))
    draw(source, picture, dark=scheme == "dark")
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    corner = pixels[2, 2].mean()
    assert corner > 240 if scheme == "light" else corner < 40
    strong = (pixels.max(axis=2).astype(int) - pixels.min(axis=2)) > 90  # saturated: bars and curves
    assert strong.sum() > 5_000


def draw(source: Path, picture: Path, dark: bool) -> None:
    """Screenshot a page in headless Chromium."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,4200"]
    command += [f"--user-data-dir={picture.parent / 'profile'}", f"--screenshot={picture}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    subprocess.run([*command, source.as_uri()], check=True, capture_output=True, timeout=120)
