"""What a GR00T checkpoint says of its robots: modality keys, statistics by key, settings, row of the per-embodiment weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from innerloop.contract.errors import CheckpointError
from innerloop.weights.fields import Fields
from innerloop.weights.processors import ProcessorStep, Statistics
from innerloop.weights.source import read_object

STEP = "groot"  # the step under which the files of an Isaac-GR00T directory are kept in Checkpoint.preprocessor
_PACK, _ENCODE, _DECODE = (f"groot_n1_7_{name}_v1" for name in ("pack_inputs", "vlm_encode", "action_decode"))
_UNPACK = "groot_action_unpack_unnormalize_v2"
_MODELS = ("gr00tn1d7", "gr00tn17")
_CAMERA = "observation.images."
_LISTS = {"modality_keys": str, "delta_indices": int, "action_configs": dict}  # of a modality, and what they hold
_MODALITIES = ("state", "action", "relative_action")


@dataclass(frozen=True)
class Embodiment:
    """One robot. index: row of the per-embodiment weights; modality: video, state, action -> keys and their settings.

    statistics: state, action or relative_action -> key -> statistic -> values. settings: Isaac-GR00T's processor_kwargs.
    """

    name: str
    index: int
    modality: Mapping[str, Any]
    statistics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    settings: Mapping[str, Any]
    cameras: tuple[str, ...] = ()  # in the order of a policy that names none in `modality`


class Opened(Protocol):
    """A checkpoint, as far as it says something of its robots."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def preprocessor(self) -> Sequence[ProcessorStep] | None: ...
    @property
    def postprocessor(self) -> Sequence[ProcessorStep] | None: ...


def read_embodiment(
    directory: Path, config: Mapping[str, Any], choice: str | None
) -> tuple[Statistics, tuple[ProcessorStep, ...], str | None]:
    """One robot of an Isaac-GR00T directory: statistics by `modality.key`, everything else as a step, its name."""
    if str(config.get("model_type")).lower().replace("_", "") not in _MODELS:
        raise CheckpointError(
            f"{directory} is a {config.get('model_type')}; of GR00T only N1.7 (Gr00tN1d7) is supported"
        )
    statistics = read_object(directory / "statistics.json")
    kwargs = read_object(directory / "processor_config.json").get("processor_kwargs")
    if not isinstance(kwargs, dict) or not isinstance(kwargs.get("modality_configs"), dict):
        raise CheckpointError(f"{directory / 'processor_config.json'} has no modality_configs: export it again")
    modalities = kwargs["modality_configs"]
    names = sorted(set(statistics) & set(modalities))
    name = _chosen(directory, names, choice)
    indices = read_object(directory / "embodiment_id.json")
    if not _is_row(indices.get(name)):
        raise CheckpointError(
            f"{directory / 'embodiment_id.json'} gives '{name}' no number (it names {', '.join(sorted(indices))}): "
            "with another robot's weights actions would look plausible and be wrong. Add it"
        )
    settings = {key: value for key, value in kwargs.items() if key != "modality_configs"}
    kept = {"name": name, "index": indices[name], "modality": modalities[name], "settings": settings}
    flat = {
        f"{modality}.{key}": arrays
        for modality, keys in _statistics(f"statistics.json {name}", statistics[name]).items()
        for key, arrays in keys.items()
    }
    return flat, (ProcessorStep(STEP, kept),), name


def embodiment(checkpoint: Opened) -> Embodiment:
    """The robot of an opened checkpoint, Isaac-GR00T's or LeRobot's. Raises CheckpointError."""
    steps = {step.name: step for step in (*(checkpoint.preprocessor or ()), *(checkpoint.postprocessor or ()))}
    if STEP in steps:
        nested: dict[str, dict[str, Any]] = {}
        for name, values in checkpoint.statistics.items():
            modality, _, key = name.partition(".")
            nested.setdefault(modality, {})[key] = values
        return _checked(Embodiment(statistics=nested, **steps[STEP].config))
    if _PACK not in steps or _ENCODE not in steps:
        raise CheckpointError("policy_preprocessor.json has no GR00T N1.7 steps: save the policy with LeRobot 0.6")
    features = Fields("config.json", checkpoint.config).section("input_features").values
    cameras = sorted(name.removeprefix(_CAMERA) for name in features if name.startswith(_CAMERA))
    return replace(_checked(_saved(steps)), cameras=tuple(cameras))  # LeRobot feeds them in alphabetical order


def _checked(found: Embodiment) -> Embodiment:
    """The robot, if its modalities are mappings whose lists hold what they should."""
    modality = found.modality if isinstance(found.modality, Mapping) else {"modality_configs": found.modality}
    for name, part in modality.items():
        if not isinstance(part, Mapping):
            raise CheckpointError(f"the processor's '{name}' of '{found.name}' is {str(part)[:60]!r}: export it again")
        for key, kind in _LISTS.items():
            values = part.get(key)
            if values is not None and not (isinstance(values, list) and all(isinstance(v, kind) for v in values)):
                raise CheckpointError(
                    f"the processor's {name}.{key} of '{found.name}' is {str(values)[:60]!r}, not a list of "
                    f"{kind.__name__}: export it again"
                )
    return found


def _saved(steps: Mapping[str, ProcessorStep]) -> Embodiment:
    """LeRobot keeps the same facts in the settings of its own steps."""
    pack = Fields(f"policy_preprocessor.json {_PACK}", steps[_PACK].config)
    name = pack.text("embodiment_tag")
    index = pack.section("embodiment_mapping").count(name)
    decode = steps[_DECODE] if _DECODE in steps else steps.get(_UNPACK, ProcessorStep(_UNPACK))
    settings = {**steps[_ENCODE].config, **decode.config, **pack.values}
    modality, raw = pack.section("modality_config").values, pack.section("raw_stats")
    if modality and raw.values:
        return Embodiment(name, index, modality, _statistics(f"{raw.file} raw_stats", raw.values), settings)
    flat: dict[str, dict[str, Any]] = {}
    for entry, values in steps[_PACK].state.items():
        feature, _, statistic = entry.rpartition(".")
        flat.setdefault(feature.rpartition(".")[2], {})[statistic] = values
    keys: dict[str, dict[str, Any]] = {kind: {"modality_keys": [kind]} for kind in ("state", "action") if kind in flat}
    if len(keys) < 2:
        raise CheckpointError(
            f"the processors hold statistics of {sorted(flat) or 'nothing'}; state and action are needed"
        )
    horizon = {"delta_indices": list(range(pack.size("valid_action_horizon")))}
    video = {
        "modality_keys": pack.values.get("video_modality_keys"),
        "delta_indices": [0] * pack.size("video_horizon", 1),
    }
    modality = {"state": keys["state"], "action": {**keys["action"], **horizon}, "video": video}
    statistics = {kind: {kind: flat[kind]} for kind in keys}
    return Embodiment(name, index, modality, statistics, {**settings, "use_percentiles": False})


def _chosen(directory: Path, names: list[str], choice: str | None) -> str:
    listing = ", ".join(names)
    if not names:
        raise CheckpointError(
            f"{directory}: no robot is named in both statistics.json and processor_config.json; export them again"
        )
    if choice is None and len(names) > 1:
        raise CheckpointError(f"{directory} serves {len(names)} robots ({listing}): choose one with assets=NAME")
    if choice is not None and choice not in names:
        raise CheckpointError(f"{directory} has no robot '{choice}'; assets= takes one of {listing}")
    return choice or names[0]


def _is_row(found: object) -> bool:
    return type(found) is int and found >= 0


def _statistics(where: str, stored: Any) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """Modality -> key -> statistic -> values."""
    found = {modality: _named(where, stored).get(modality) or {} for modality in _MODALITIES}
    return {
        modality: {
            key: _arrays(f"{where} {modality}.{key}", values)
            for key, values in _named(f"{where} {modality}", keys).items()
        }
        for modality, keys in found.items()
    }


def _named(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is {str(values)[:60]!r}, not statistics by name: export it again")
    return values


def _arrays(where: str, values: Any) -> dict[str, np.ndarray]:
    found = {}
    for name, value in _named(where, values).items():
        if value is None:
            continue  # what is needed and absent is named where it is used
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: {name} is not numbers ({error}); compute it again") from error
        if not np.isfinite(array).all():
            raise CheckpointError(f"{where}: {name} is not finite; compute it again")
        found[name] = array
    return found
