"""What a checkpoint says about processing: LeRobot's step lists and the normalisation statistics of either layout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from innerloop.contract.errors import CheckpointError
from innerloop.weights.source import SafetensorsFile, read_json

Statistics = dict[str, dict[str, np.ndarray]]

# openpi's feature names (src/openpi/transforms.py) -> LeRobot's (lerobot/utils/constants.py)
_FEATURES = {"state": "observation.state", "actions": "action"}


@dataclass(frozen=True)
class ProcessorStep:
    """One step of a LeRobot pipeline: registered name, settings, state arrays (`<feature>.<statistic>`)."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)


def read_pipeline(path: Path) -> tuple[ProcessorStep, ...]:
    """The steps of policy_preprocessor.json or policy_postprocessor.json, state files included."""
    content = read_json(path)
    steps = content.get("steps") if isinstance(content, dict) else None
    if not isinstance(steps, list):
        raise CheckpointError(f"{path} has no list of steps: save the processors again")
    return tuple(_step(path, entry) for entry in steps)


def pipeline_statistics(
    preprocessor: Sequence[ProcessorStep] | None, postprocessor: Sequence[ProcessorStep] | None
) -> Statistics:
    """Statistics by feature: actions from the un-normaliser, everything else from the normaliser."""
    before, after = _normalizer_state(preprocessor or ()), _normalizer_state(postprocessor or ())
    merged = {**after, **before}
    if "action" in after:
        merged["action"] = after["action"]
    return _finite(merged, "the checkpoint's normaliser")


def find_norm_stats(directory: Path) -> dict[str, Path]:
    """openpi's statistics below assets/: asset id (may contain slashes) -> norm_stats.json."""
    root = directory / "assets"
    return {p.parent.relative_to(root).as_posix(): p for p in sorted(root.rglob("norm_stats.json"))}


def choose_norm_stats(directory: Path, choice: str | None) -> tuple[str, Path] | None:
    """The one set of statistics to use, or None when the directory has none. Several and no choice is an error."""
    found = find_norm_stats(directory)
    listing = ", ".join(found)
    if choice is None:
        if len(found) > 1:
            raise CheckpointError(
                f"{directory / 'assets'} holds {len(found)} sets of statistics ({listing}): choose one with assets=NAME"
            )
        return next(iter(found.items()), None)
    if choice in found:
        return choice, found[choice]
    path = Path(choice)
    path = path / "norm_stats.json" if path.is_dir() else path
    if path.is_file():
        return choice, path
    raise CheckpointError(f"no statistics '{choice}' in {directory / 'assets'}; there are: {listing or 'none'}")


def read_norm_stats(path: Path) -> Statistics:
    """openpi's norm_stats.json with LeRobot's feature names; float64 arrays, absent quantiles left out."""
    content = read_json(path)
    table = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} has no 'norm_stats': compute the statistics again")
    statistics: Statistics = {}
    for feature, stats in table.items():
        try:
            arrays = {k: np.asarray(v, dtype=np.float64) for k, v in stats.items() if v is not None}
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: statistics of '{feature}' are not arrays of numbers ({error})") from error
        statistics[_FEATURES.get(str(feature), str(feature))] = arrays
    return _finite(statistics, str(path))


def _step(path: Path, entry: Any) -> ProcessorStep:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("config") or {}, Mapping):
        said = json.dumps(entry)[:100]
        raise CheckpointError(f"{path}: a step, or its config, is not an object ({said}): save the processors again")
    name = str(entry.get("registry_name") or entry.get("class") or "")
    if not name:
        raise CheckpointError(f"{path}: a step has neither registry_name nor class: save the processors again")
    config = entry.get("config") or {}
    file = entry.get("state_file")
    if file is None:
        return ProcessorStep(name, config)
    state_path = path.parent / str(file)
    if Path(str(file)).name != str(file):
        raise CheckpointError(f"{path}: step '{name}' names the state file '{file}', which lies outside its directory")
    if not state_path.is_file():
        raise CheckpointError(
            f"{path.parent}: {path.name} needs {file} for its step '{name}', which does not exist; copy it there"
        )
    return ProcessorStep(name, config, _arrays(state_path))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    tensors = {name: file.read(name) for name in file.names()}
    # numpy has no bfloat16; float32 holds every value of it.
    return {n: (t.float() if t.dtype is torch.bfloat16 else t).numpy().copy() for n, t in tensors.items()}


def _normalizer_state(steps: Sequence[ProcessorStep]) -> Statistics:
    statistics: Statistics = {}
    for step in steps:
        if not step.name.endswith("normalizer_processor"):
            continue
        for key, array in step.state.items():
            feature, _, statistic = str(key).rpartition(".")
            statistics.setdefault(feature, {})[statistic] = array
    return statistics


def _finite(statistics: Statistics, origin: str) -> Statistics:
    for feature in ("observation.state", "action"):
        for statistic, array in statistics.get(feature, {}).items():
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{origin}: '{feature}.{statistic}' is not finite ({json.dumps(array.tolist())[:200]}): "
                    "compute the statistics again"
                )
    return statistics
