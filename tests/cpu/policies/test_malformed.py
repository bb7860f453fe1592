"""Whatever the JSON files of a directory hold in any one place, it loads or is refused in our own words."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loaded_policies import CHECKPOINTS

from innerloop.contract import InnerloopError
from innerloop.engine.assembly import outline
from innerloop.policies import detect
from innerloop.process import Edge
from innerloop.weights import open_checkpoint

ODD = (None, "x", -1, [], {"a": 1})


def variants(content: Any) -> Iterator[Any]:
    """The content with one place made odd, or left out."""
    yield from ODD
    if not isinstance(content, dict | list):
        return
    for key in content if isinstance(content, dict) else range(len(content)):
        for odd in variants(content[key]):
            changed = content.copy()
            changed[key] = odd
            yield changed
        changed = content.copy()
        del changed[key]
        yield changed


@pytest.mark.parametrize("name", ["config.json", "policy_preprocessor.json", "policy_postprocessor.json"])
def test_malformed_json_is_refused_by_name(tmp_path: Path, name: str) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "c"))
    refused = 0
    for content in variants(json.loads((directory / name).read_text())):
        (directory / name).write_text(json.dumps(content))
        try:
            checkpoint = open_checkpoint(directory)
            family = detect(checkpoint)
            config = family.config(checkpoint, None)
            family.processor(config, checkpoint, Edge())
            outline(family, config, checkpoint.tensors)
        except InnerloopError:
            refused += 1
    assert refused > 20
