"""A checkpoint directory, whichever project wrote it: what it says about itself, before any weight is read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from innerloop.contract.errors import CheckpointError
from innerloop.weights.embodiments import read_embodiment
from innerloop.weights.files import open_weight_files
from innerloop.weights.lora import CONFIG as ADAPTER_CONFIG
from innerloop.weights.lora import LoraSource, holds_adapter
from innerloop.weights.orbax import is_orbax, open_orbax
from innerloop.weights.processors import (
    ProcessorStep,
    Statistics,
    choose_norm_stats,
    find_norm_stats,
    pipeline_statistics,
    read_norm_stats,
    read_pipeline,
)
from innerloop.weights.source import TensorSource, check_not_pointer, read_json
from innerloop.weights.starvla import find_run, open_run_weights, read_run, run_statistics

_UNFINISHED = re.compile(r".*\.orbax-checkpoint-tmp(-.*)?")  # Orbax's name for a save in progress
_OLD_STATISTICS = ("normalize_inputs.", "unnormalize_outputs.", "normalize_targets.")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
_READ = {".json", ".yaml", ".safetensors", ".bin", ".pt", ".model"}  # suffixes of files that are read
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name, as Hugging Face has it
_DEEPEST = 4  # directories between a training run, or a download cache, and its weights


@dataclass(frozen=True)
class Checkpoint:
    """path: the directory asked for; layout: lerobot, openpi, orbax, groot, starvla or transformers.

    config: config.json (starVLA: config.yaml) or {}. statistics: feature -> statistic -> array, with LeRobot's feature names.
    assets: the statistics set that was chosen, where sets have names. adapter: its directory; adapter_config: its
    settings. notes: what a user should know but need not change.
    """

    path: Path
    layout: str
    config: dict[str, Any]
    preprocessor: tuple[ProcessorStep, ...] | None
    postprocessor: tuple[ProcessorStep, ...] | None
    statistics: Statistics
    tokenizer: Path | None
    tensors: TensorSource
    assets: str | None = None
    adapter: Path | None = None
    adapter_config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def open_checkpoint(path: str | Path, *, assets: str | None = None, adapter: str | Path | None = None) -> Checkpoint:
    """Read headers and JSON only. Raises CheckpointError, naming file and remedy, for anything broken or ambiguous.

    `assets` names one of several openpi or starVLA statistics sets (or is a path to openpi's), or a GR00T's embodiment;
    `adapter` is a PEFT LoRA directory.
    """
    directory = _directory(Path(path))
    run = find_run(directory)
    if run is not None:
        return _open_starvla(run, assets, adapter)
    base, adapter_directory = _base_and_adapter(directory, None if adapter is None else _directory(Path(adapter)))
    tensors = open_orbax(base) if is_orbax(base) else open_weight_files(base)
    if tensors is None:
        raise CheckpointError(_no_weights(base))
    places = [base] if adapter_directory is None else [adapter_directory, base]
    config = _config(places)
    layout = _layout(base, config, tensors)
    notes = _notes(config, adapter_directory)
    adapter_config = None
    if adapter_directory is not None:
        lora = LoraSource(tensors, adapter_directory)
        tensors, adapter_config = lora, lora.config
    _check_age(places, tensors)
    before, after = (_pipeline(places, f"policy_{kind}.json") for kind in ("preprocessor", "postprocessor"))
    if layout == "groot":
        statistics, before, chosen = read_embodiment(base, config, assets)
    else:
        statistics, chosen = _statistics(places, layout, assets, (before, after))
    return Checkpoint(
        path=directory,
        layout=layout,
        config=config,
        preprocessor=before,
        postprocessor=after,
        statistics=statistics,
        tokenizer=_tokenizer(places),
        tensors=tensors,
        assets=chosen,
        adapter=adapter_directory,
        adapter_config=adapter_config,
        notes=notes,
    )


def _open_starvla(run: Path, assets: str | None, adapter: str | Path | None) -> Checkpoint:
    if adapter is not None:
        raise CheckpointError(f"{run} is a starVLA run, whose weights take no adapter: merge it in starVLA first")
    tensors, notes = open_run_weights(run)
    statistics, chosen = run_statistics(run, assets)
    return Checkpoint(
        path=run,
        layout="starvla",
        config=read_run(run),
        preprocessor=None,
        postprocessor=None,
        statistics=statistics,
        tokenizer=_tokenizer([run]),
        tensors=tensors,
        assets=chosen,
        notes=notes,
    )


def _directory(path: Path) -> Path:
    path = path.expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file: pass the checkpoint directory, {path.parent}")
    if not path.is_dir():
        how = f" (`hf download {path} --local-dir DIR`)" if _REPOSITORY.fullmatch(str(path)) else ""
        raise CheckpointError(
            f"there is no directory {path}: download the checkpoint first{how} and pass its local path"
        )
    for part in (path.absolute(), *path.absolute().parents):
        if _UNFINISHED.fullmatch(part.name):
            raise CheckpointError(
                f"{path}: the save did not finish ({part.name} is a temporary directory): use another step"
            )
    unfinished = [child.name for child in path.iterdir() if _UNFINISHED.fullmatch(child.name)]
    finished = sorted(child.name for child in path.iterdir() if child.name.isdigit() and child.is_dir())
    if unfinished and not finished:
        raise CheckpointError(f"{path}: the save did not finish (it still holds {unfinished[0]}): use another step")
    broken = sorted(child.name for child in path.iterdir() if child.suffix in _READ and not child.exists())
    if broken:
        raise CheckpointError(
            f"{path}: links to files that are not there: {', '.join(broken)}; the download was interrupted or its cache "
            "was emptied: download it again"
        )
    return path


def _base_and_adapter(directory: Path, adapter: Path | None) -> tuple[Path, Path | None]:
    """Adapters are found by their files. An adapter's own directory may stand for the pair if its base is local."""
    if adapter is not None:
        if not holds_adapter(adapter):
            raise CheckpointError(f"{adapter} holds no adapter ({ADAPTER_CONFIG}, adapter_model.safetensors)")
        if holds_adapter(directory) and directory.resolve() != adapter.resolve():
            raise CheckpointError(f"{directory} holds an adapter too: merge it first, or pass only one of the two")
        return directory, adapter
    if not holds_adapter(directory):
        return directory, None
    if is_orbax(directory) or open_weight_files(directory) is not None:
        return directory, directory
    config = read_json(directory / ADAPTER_CONFIG)
    named = str(config.get("base_model_name_or_path") or "") if isinstance(config, dict) else ""
    for candidate in (Path(named), directory / named):
        if named and candidate.is_dir() and candidate.resolve() != directory.resolve():
            return candidate, directory
    raise CheckpointError(
        f"{directory} holds only an adapter for the base '{named or 'unknown'}', which is not a directory here: "
        f"pass the base's directory as the checkpoint and this one as adapter="
    )


def _no_weights(directory: Path) -> str:
    """The message for a directory without weights, with the place where they probably are."""
    place = directory
    for _ in range(_DEEPEST):
        place = _below(place) or place
    if place != directory:
        hint = f"pass {place} instead, if that is the checkpoint"
    else:
        hint = "download or export model.safetensors (or its shards and their index) there"
    found = ", ".join(sorted(child.name for child in directory.iterdir())[:12]) or "nothing"
    return f"{directory} holds no weights (it holds: {found}); {hint}"


def _below(directory: Path) -> Path | None:
    """Where the next part of the way to the weights leads: of a training run, or of Hugging Face's cache."""
    steps = sorted((c.name for c in directory.iterdir() if c.name.isdigit() and c.is_dir()), key=int)
    names = ["pretrained_model", "params", "checkpoints", "last", *steps[-1:]]
    if (directory / "refs" / "main").is_file():
        names.append(f"snapshots/{(directory / 'refs' / 'main').read_text().strip()}")
    return next((directory / name for name in names if (directory / name).is_dir()), None)


def _config(places: Sequence[Path]) -> dict[str, Any]:
    """config.json; an adapter's own fields stand before its base's, which alone may state the model's sizes."""
    merged: dict[str, Any] = {}
    for place in places:
        if not (place / "config.json").is_file():
            continue
        config = read_json(place / "config.json")
        if not isinstance(config, dict):
            raise CheckpointError(f"{place / 'config.json'} is not a JSON object: export it again")
        merged = {**config, **merged}
    return merged


def _layout(directory: Path, config: dict[str, Any], tensors: TensorSource) -> str:
    if is_orbax(directory):
        return "orbax"
    if "type" in config or (directory / "policy_preprocessor.json").is_file():
        if not config:
            raise CheckpointError(f"{directory} has no config.json, which says what these weights are: copy it there")
        return "lerobot"
    if str(config.get("model_type", "")).lower().startswith("gr00t"):
        return "groot"
    if any((place / "dataset_statistics.json").is_file() for place in (directory, directory.parent)):
        return "starvla"
    if any(name.startswith("paligemma_with_expert.") for name in tensors.names()):
        return "openpi"
    if "model_type" in config or "architectures" in config:
        return "transformers"
    raise CheckpointError(
        f"{directory} holds weights of no known layout: its config.json has no type, model_type or architectures, "
        f"and its first tensor is '{next(iter(tensors.names()), 'none')}'; export it with LeRobot or openpi"
    )


def _check_age(places: Sequence[Path], tensors: TensorSource) -> None:
    """LeRobot before 0.4 kept statistics among the weights, where no processor of today finds them."""
    old = [name for name in tensors.names() if name.startswith(_OLD_STATISTICS)]
    if old and not any((place / "policy_preprocessor.json").is_file() for place in places):
        raise CheckpointError(
            f"{places[-1]} was saved before LeRobot had processors (it holds '{old[0]}' among its weights): convert it "
            "with `python -m lerobot.processor.migrate_policy_normalization --pretrained-path DIR`"
        )


def _notes(config: dict[str, Any], adapter: Path | None) -> tuple[str, ...]:
    if config.get("use_peft") and adapter is None:
        return ("config.json says use_peft, but there are no adapter files: the weights are used as they are",)
    return ()


def _pipeline(places: Sequence[Path], name: str) -> tuple[ProcessorStep, ...] | None:
    return next((read_pipeline(place / name) for place in places if (place / name).is_file()), None)


def _statistics(
    places: Sequence[Path],
    layout: str,
    assets: str | None,
    pipelines: tuple[tuple[ProcessorStep, ...] | None, tuple[ProcessorStep, ...] | None],
) -> tuple[Statistics, str | None]:
    if layout not in ("openpi", "orbax"):
        if assets is not None:
            raise CheckpointError(
                f"assets='{assets}' was given, but {places[0]} is a {layout} checkpoint with one set of statistics: "
                "leave assets out"
            )
        return pipeline_statistics(*pipelines), None
    homes = [place.parent if place.name == "params" and is_orbax(place) else place for place in places]
    home = next((home for home in homes if find_norm_stats(home)), homes[-1])
    chosen = choose_norm_stats(home, assets)
    return ({}, None) if chosen is None else (read_norm_stats(chosen[1]), chosen[0])


def _tokenizer(places: Sequence[Path]) -> Path | None:
    for place in places:
        named = [place / name for name in _TOKENIZERS if (place / name).is_file()]
        found = named or sorted(place.glob("*.model"))
        if len(found) > 1 and not named:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{place} holds several tokenizers ({names}): keep one, or name it tokenizer.model")
        if found:
            check_not_pointer(found[0])
            return found[0]
    return None
