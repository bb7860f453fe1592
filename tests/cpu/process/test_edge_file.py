"""What only the caller knows, from a file: every field arrives, every mistake is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from innerloop.contract import InnerloopError
from innerloop.process import Edge, ImageSpec, LimitsError, read_edge
from innerloop.process.action import ActionLimits


def written(directory: Path, content: Any) -> Path:
    """A file with this JSON."""
    path = directory / "edge.json"
    path.write_text(json.dumps(content))
    return path


def test_the_documented_example_fits_its_robot(tmp_path: Path) -> None:
    document = Path(__file__).resolve().parents[3] / "docs" / "process.md"
    example = document.read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0]
    edge = read_edge(written(tmp_path, json.loads(example)))
    assert edge.limits is not None
    assert edge.action_dim is not None
    assert edge.relative is not None
    edge.limits.check(edge.action_dim)
    assert len(edge.relative) == edge.action_dim


def test_every_field_arrives(tmp_path: Path) -> None:
    plain = {
        "rename": {"front": "base"},
        "absent": ["side"],
        "normalization": "MEAN_STD",
        "state_dim": 8,
        "action_dim": 7,
        "relative": [True, False],
        "state_in_prompt": False,
    }
    limits = {"position": [[-1, 1]] * 7, "step": [0.1] * 7, "on_violation": "clamp"}
    content = {**plain, "images": {"layout": "CHW"}, "limits": limits, "tokenizer": "tokenizer.json"}
    assert sorted(content) == sorted(Edge.__dataclass_fields__)
    edge = read_edge(written(tmp_path, content))
    assert {name: getattr(edge, name) for name in plain} == plain
    assert edge.images == ImageSpec(layout="CHW")
    assert edge.tokenizer == tmp_path / "tokenizer.json"
    assert edge.limits is not None
    assert np.array_equal(edge.limits.position, np.array([[-1, 1]] * 7, np.float32))  # type: ignore[arg-type]
    assert read_edge(written(tmp_path, {})) == Edge()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "not a JSON object.*rename"),
        ({"renames": {}}, "'renames' is not known; the keys are rename"),
        ({"state_dim": "8"}, "'state_dim' is \"8\"; it takes a whole number"),
        ({"state_dim": True}, "'state_dim' is true"),
        ({"state_in_prompt": 0}, "it takes true or false"),
        ({"rename": {"front": 0}}, "'rename' is .*; it takes an object {robot camera: checkpoint camera}"),
        ({"absent": [None]}, "'absent' is .*; it takes a list of checkpoint cameras"),
        ({"relative": [True, "false"]}, "'relative' is .*; it takes a list of true and false"),
        ({"images": {"order": "BGR"}}, "images has no 'order'; it has layout, color, range"),
        ({"images": {"color": "GBR"}}, "'GBR' is not known"),
        ({"limits": {"jerk": [1.0], "on_violation": "clamp"}}, "jerk limit cannot be clamped"),
        ({"limits": {"step": ["fast"]}}, "limits cannot be used"),
        ({"limits": {"step": [1.0], "on_violation": "stop"}}, "it is reject or clamp"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(InnerloopError, match=words):
        read_edge(written(tmp_path, content))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(InnerloopError, match="not a readable JSON file"):
        read_edge(tmp_path / "nowhere.json")


def test_a_limit_of_nan_bounds_nothing() -> None:
    with pytest.raises(LimitsError, match="'step' holds NaN"):
        ActionLimits(step=np.array([0.1, np.nan]))
