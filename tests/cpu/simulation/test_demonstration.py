"""The demonstration that ships with the trained policy, on the tiny checkpoint: closed loop, and where nothing renders."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from toys import Seen

from innerloop import demo as demonstration
from innerloop.measure import record
from innerloop.simulation import display, episode, evaluate
from innerloop.simulation.display import DisplayError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(demonstration, "World", Seen)
    monkeypatch.setattr(evaluate, "version", lambda name: "0")
    monkeypatch.setattr(episode, "LIMIT", 12)
    monkeypatch.setattr(demonstration, "EXECUTE", 5)  # of ten

    def run() -> str:
        said = io.StringIO()
        out = Console(file=said, width=150)
        demonstration.main(tmp_path, "cpu", None, out, EXAMPLES / "checkpoints" / "tiny-pi05", EXAMPLES / "frames")
        return said.getvalue()

    return run


def test_it_runs_every_task_and_writes_film_page_and_record(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(display, "prepare", lambda say: "osmesa")
    said = demo()
    for words in (
        "done after 0.1 s, 1 decisions",
        "2 of 15",
        "robot units",
        "when everything has changed",
        "-bound at",
    ):
        assert words in said
    found: Any = record.load(tmp_path / "success.json")
    assert (found.successes, found.episodes, found.horizon, found.mode) == (2, 15, 5, "synchronous")
    page = (tmp_path / "index.html").read_text()
    for words in ("2 of 15", "data:image/gif;base64,", "<svg", "of 40 Hz"):
        assert words in page
    with Image.open(tmp_path / "episodes.gif") as film:
        assert film.size == (5 * 160, 160)
        assert film.n_frames > 1
    assert "<svg" in (tmp_path / "plan.html").read_text()


def test_where_nothing_renders_it_decides_on_recorded_frames(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(say: Any) -> str:
        raise DisplayError("type: sudo apt-get install libosmesa6")

    monkeypatch.setattr(display, "prepare", refuse)
    said = demo()
    for words in ("no simulation: type: sudo apt-get", "4 recorded observations instead", "robot units", "vision"):
        assert words in said
    assert not (tmp_path / "index.html").exists()
    assert "<svg" in (tmp_path / "plan.html").read_text()
