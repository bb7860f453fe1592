"""A plan for people: the table and the page show every stage, buffer and clock."""

import io
import shutil
from pathlib import Path

from rich.console import Console

from innerloop import engine
from innerloop.measure import plan_text

TINY = Path(__file__).resolve().parents[3] / "examples" / "checkpoints" / "tiny-pi05"


def test_page_is_self_contained_and_complete() -> None:
    sketch = engine.sketch(TINY)
    manifest = sketch.manifests[-1]
    page = plan_text.page(manifest, sketch.details)
    assert "http" not in page.replace("http-equiv", "")
    for thing in (*manifest["stages"], *manifest["buffers"]):
        assert thing["name"] in page
    assert page.count("<path") >= len(manifest["stages"])


def test_tables_name_every_stage_and_buffer() -> None:
    manifest = engine.sketch(TINY).manifests[-1]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_text.tables(manifest))
    text = console.export_text()
    for thing in (*manifest["stages"], *manifest["buffers"]):
        assert thing["name"] in text


def test_sketch_allocates_nothing_and_counts_parameters() -> None:
    sketch = engine.sketch(TINY, precision="fp32")
    assert sketch.details["parameters"] == 214_608
    weights = sketch.memory.by_role()["weights"]
    assert weights == 4 * sketch.details["parameters"]


def test_stage_table_says_what_brings_a_stage_back_and_what_it_took() -> None:
    manifest = engine.sketch(TINY).manifests[-1]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_text.timed(manifest, {"layout": 0.5, "prompt+vision": 7.25, "context": 3.0, "action": 9.0}))
    rows = {line.split()[1]: line for line in console.export_text().splitlines() if line.startswith("│")}
    assert "never" in rows["tables"]
    assert "at load" in rows["tables"]
    assert "7.25" in rows["prompt"]
    assert "in prompt+vision" in rows["vision"]
    assert "frames, frame_sizes" in rows["vision"]
    assert "tokens" not in rows["vision"]
    assert {"frames", "tokens", "camera_mask"} <= set(rows["context"].replace(",", " ").split())
    assert "every decision" in rows["action"]


def test_sketch_says_what_the_robot_must_send_or_what_is_missing(tmp_path: Path) -> None:
    lines = dict(plan_text.flat(engine.sketch(TINY).details))
    assert (lines["cameras"], lines["processing.state.width"], lines["processing.action.width"]) == (
        "base, wrist",
        "8",
        "7",
    )
    assert lines["processing.prompt.tokenizer"].endswith("tokenizer.json")
    bare = Path(shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json")))
    found = engine.sketch(bare)
    assert "no tokenizer in" in dict(plan_text.flat(found.details))["processing.missing"]
    assert "processing.missing" in plan_text.page(found.manifests[-1], found.details)
