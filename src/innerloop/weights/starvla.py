"""A starVLA run directory: config.yaml, dataset_statistics.json, checkpoints/steps_N_pytorch_model.pt or .safetensors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from innerloop.contract.errors import CheckpointError
from innerloop.weights.fields import Fields
from innerloop.weights.files import open_weight_files
from innerloop.weights.processors import Statistics
from innerloop.weights.source import TensorSource, open_tensor_file, read_object

_STEP = re.compile(r"steps_(\d+)")
_ALIASES = {"QwenFM": "QwenPI", "QwenFAST": "QwenFast"}
_FEATURES = {"state": "observation.state", "action": "action"}


def find_run(directory: Path) -> Path | None:
    """The run directory, given it or its checkpoints/; None where it is not starVLA's."""
    for place in (directory, directory.parent) if directory.name in ("checkpoints", "final_model") else (directory,):
        if (place / "config.yaml").is_file() and (place / "dataset_statistics.json").is_file():
            return place
    return None


def read_run(run: Path) -> dict[str, Any]:
    """config.yaml as plain data."""
    import yaml

    path = run / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not readable YAML ({error}); copy it from the training run again") from error
    if not isinstance(content, dict) or not isinstance(content.get("framework"), dict):
        raise CheckpointError(f"{path} has no 'framework' section; it is not a starVLA training configuration")
    return content


def framework_name(config: Mapping[str, Any]) -> str:
    """The framework of a run's config.yaml by its present name."""
    name = str(config["framework"].get("name"))
    return _ALIASES.get(name, name)


def data_section(config: Mapping[str, Any]) -> Fields:
    """What config.yaml says of the training data, empty where it says nothing."""
    return section(config, "datasets", "vla_data")


def action_section(config: Mapping[str, Any]) -> Fields:
    """What config.yaml says of the action head."""
    return section(config, "framework", "action_model")


def section(config: Mapping[str, Any], *names: str) -> Fields:
    """A section of config.yaml, empty where it is not there. Raises CheckpointError for one that is no mapping."""
    found = Fields("config.yaml", config)
    for name in names:
        found = found.section(name)
    return found


def base_model(run: Path, config: Mapping[str, Any]) -> tuple[str, Path | None]:
    """The name of the run's vision-language model, and its directory: where config.yaml says, or inside the run."""
    stated = section(config, "framework", "qwenvl").text("base_vlm", "")
    name = Path(stated).name
    places = [run / stated, Path(stated), run / name] if stated else []
    return name, next((place for place in places if place != run and place.is_dir()), None)


def open_run_weights(run: Path) -> tuple[TensorSource, tuple[str, ...]]:
    """The weights of the latest step, and a note where there was a choice."""
    files = [path for place in ("checkpoints", "final_model") for path in sorted((run / place).glob("*"))]
    files = [path for path in files if path.suffix in (".pt", ".safetensors")]
    if not files:
        whole = open_weight_files(run)
        if whole is None:
            raise CheckpointError(f"{run} holds no checkpoints/*.pt or *.safetensors: copy the trained weights there")
        return whole, ()
    latest = max(files, key=_order)
    notes = (f"{latest.name} was chosen from {len(files)} checkpoints",) if len(files) > 1 else ()
    return open_tensor_file(latest), notes


def run_statistics(run: Path, choice: str | None) -> tuple[Statistics, str]:
    """Statistics of one data set by LeRobot's feature names (mask: bool), and the set's name."""
    path = run / "dataset_statistics.json"
    content = read_object(path)
    if not content:
        raise CheckpointError(f"{path} names no data set: copy it from the training run again")
    listing = ", ".join(content)
    if choice is None and len(content) > 1:
        raise CheckpointError(f"{path} has statistics of {listing}: choose one with assets=NAME")
    name = choice if choice is not None else next(iter(content))
    if name not in content:
        raise CheckpointError(f"{path} has no statistics '{name}'; there are: {listing}")
    found: Statistics = {}
    for feature, ours in _FEATURES.items():
        stored = content[name].get(feature) or {} if isinstance(content[name], dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{path}: '{name}' has no statistics of '{feature}' by name; copy the file again")
        found[ours] = {key: _array(path, f"{name}.{feature}.{key}", value) for key, value in stored.items()}
    return {feature: stats for feature, stats in found.items() if stats}, name


def _array(path: Path, where: str, value: Any) -> np.ndarray:
    kind = bool if where.endswith(".mask") else np.float64
    try:
        array = np.asarray(value, dtype=kind)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {where} is not an array of numbers ({error})") from error
    if not np.isfinite(array).all():
        raise CheckpointError(f"{path}: {where} is not finite; compute the statistics again")
    return array


def _order(path: Path) -> tuple[bool, int, str]:
    found = _STEP.search(path.name)
    return path.parent.name == "final_model", int(found[1]) if found else -1, path.name
