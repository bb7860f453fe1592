"""What the fixtures of this folder write, and how a directory is compared with itself."""

import hashlib
import json
from pathlib import Path
from typing import Any

STATE, ACTION = 3, 2


def contents(directory: Path) -> dict[str, str]:
    """Path -> digest of every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write_json(path: Path, value: Any) -> Path:
    """A JSON file, with the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def norm_stats(shift: float = 0.0) -> dict[str, Any]:
    """openpi's norm_stats.json."""
    stats = {"mean": [shift] * STATE, "std": [1.0] * STATE, "q01": [-1.0] * STATE, "q99": [1.0] * STATE}
    actions = {"mean": [shift] * ACTION, "std": [2.0] * ACTION, "q01": None, "q99": None}
    return {"norm_stats": {"state": stats, "actions": actions}}
