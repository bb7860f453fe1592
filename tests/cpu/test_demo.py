"""`make demo` shows what the README promises of it."""

from pathlib import Path

from typer.testing import CliRunner

from innerloop.cli import app


def test_the_demo_prints_actions_stages_and_receipt_and_writes_the_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "--output", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    said = done.stdout
    places = [
        said.index(words) for words in ("memory plan on cpu", "weights: 84 loaded", "frame pair 0", "robot units")
    ]
    assert places == sorted(places)
    assert "same frames, new noise" in said
    assert next(line for line in said.splitlines() if "new noise" in line).endswith("refreshed action")
    for words in ("fingerprint", "stages, when everything has changed", "vision", "at load"):
        assert words in said
    assert "<svg" in (tmp_path / "plan.html").read_text()
