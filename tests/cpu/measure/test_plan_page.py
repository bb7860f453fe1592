"""A plan for people: the table and the page show every stage, buffer and clock."""

import io
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
