"""What only the caller knows, from a JSON file: the fields of Edge, for those who start from a command line."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from innerloop.contract import CheckpointError
from innerloop.process.action import ActionLimits
from innerloop.process.build import Edge
from innerloop.process.image import ImageSpec

_KINDS: dict[str, tuple[type, str]] = {
    "rename": (dict, "an object {robot camera: checkpoint camera}"),
    "absent": (list, "a list of checkpoint cameras"),
    "images": (dict, "an object with layout, color, range"),
    "normalization": (str, "a mode"),
    "state_dim": (int, "a whole number"),
    "action_dim": (int, "a whole number"),
    "relative": (list, "a list of true and false, one an action dimension"),
    "state_in_prompt": (bool, "true or false"),
    "limits": (dict, "an object with position, step, jerk, on_violation"),
    "tokenizer": (str, "a path"),
}
_ITEMS: dict[str, type] = {"rename": str, "absent": str, "relative": bool}  # of what the value holds


def edge_of(file: Path | None, tokenizer: str | Path | None = None, rename: Mapping[str, str] | None = None) -> Edge:
    """The Edge of a file and of what is given beside it, which stands before the file. Raises CheckpointError."""
    found = Edge() if file is None else read_edge(file)
    renames = {**found.rename, **(rename or {})}
    return replace(found, rename=renames, tokenizer=tokenizer or found.tokenizer)


def read_edge(path: Path) -> Edge:
    """Edge from a JSON object of its fields; a relative tokenizer path starts at the file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object; its keys are {', '.join(_KINDS)}")
    for name, value in content.items():
        if name not in _KINDS:
            raise CheckpointError(f"{path}: '{name}' is not known; the keys are {', '.join(_KINDS)}")
        kind, words = _KINDS[name]
        if type(value) is not kind or not all(type(item) is _ITEMS.get(name, type(item)) for item in _items(value)):
            raise CheckpointError(f"{path}: '{name}' is {json.dumps(value)[:60]}; it takes {words}")
    parts: dict[str, Any] = dict(content)
    if "images" in content:
        parts["images"] = _made(path, "images", ImageSpec, content["images"])
    if "limits" in content:
        parts["limits"] = _made(path, "limits", ActionLimits, content["limits"])
    if "tokenizer" in content:
        parts["tokenizer"] = path.parent / content["tokenizer"]
    return Edge(**parts)


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _made(path: Path, name: str, kind: type[Any], values: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise CheckpointError(f"{path}: {name} has no '{unknown[0]}'; it has {', '.join(known)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} cannot be used: {error}") from error
