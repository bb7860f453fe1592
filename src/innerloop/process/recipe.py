"""A checkpoint's processor steps, read strictly: each is understood or refused, and must agree with the config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from innerloop.contract import CheckpointError

STATE = "observation.state"


class StoredStep(Protocol):
    """One entry of a processor json: LeRobot's registered name and the settings."""

    @property
    def name(self) -> str:
        """registry_name."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Settings."""
        ...


_NO_EFFECT = {"to_batch_processor", "device_processor"}  # they move data without changing its values
_PROMPT_STEP = {"pi05": "pi05_prepare_state_tokenizer_processor_step", "pi0": "pi0_new_line_processor"}
_BEFORE = {  # what each family's order has to be; LeRobot 0.6.1 processor_pi0.py, processor_pi05.py
    "pi05": (
        ("relative_actions_processor", "normalizer_processor"),
        ("normalizer_processor", _PROMPT_STEP["pi05"]),
        (_PROMPT_STEP["pi05"], "tokenizer_processor"),
    ),
    "pi0": (
        ("relative_actions_processor", "normalizer_processor"),
        (_PROMPT_STEP["pi0"], "tokenizer_processor"),
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What the steps say: modes, epsilon, prompt capacity, camera renames, the relative step's settings."""

    state_mode: str
    action_mode: str
    eps: float
    capacity: int
    rename: Mapping[str, str] = field(default_factory=dict)
    relative: Mapping[str, Any] | None = None


def read_recipe(
    family: str, config: Mapping[str, Any], preprocessor: Sequence[StoredStep], postprocessor: Sequence[StoredStep]
) -> Recipe:
    """Raises CheckpointError for an unknown or missing step, a wrong order, or what contradicts the config."""
    before = _by_name("policy_preprocessor", preprocessor, _known_before(family))
    after = _by_name("policy_postprocessor", postprocessor, {"unnormalizer_processor", "absolute_actions_processor"})
    for name in ("normalizer_processor", _PROMPT_STEP[family], "tokenizer_processor"):
        _require("policy_preprocessor", before, name)
    _require("policy_postprocessor", after, "unnormalizer_processor")
    _check_order("policy_preprocessor", list(before), _BEFORE[family])
    _check_order("policy_postprocessor", list(after), (("unnormalizer_processor", "absolute_actions_processor"),))
    normalizer, unnormalizer = before["normalizer_processor"], after["unnormalizer_processor"]
    renames = before.get("rename_observations_processor", {})
    _check_words("config.json", config, "normalization_mapping")
    for file, step, name in (
        ("policy_preprocessor.json", normalizer, "norm_map"),
        ("policy_postprocessor.json", unnormalizer, "norm_map"),
        ("policy_preprocessor.json", renames, "rename_map"),
    ):
        _check_words(file, step, name)
    return Recipe(
        state_mode=_state_mode(config, normalizer),
        action_mode=_agreed_mode("ACTION", config, normalizer, unnormalizer),
        eps=_agreed_eps(normalizer, unnormalizer),
        capacity=_capacity(config, before["tokenizer_processor"]),
        rename=renames.get("rename_map") or {},
        relative=_relative(config, before, after),
    )


def _known_before(family: str) -> set[str]:
    return {
        "rename_observations_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "tokenizer_processor",
        _PROMPT_STEP[family],
    }


def _by_name(file: str, steps: Sequence[StoredStep], known: set[str]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for index, step in enumerate(steps):
        name, settings = step.name, step.config
        if name in _NO_EFFECT:
            _check_cast(file, settings)
        elif name not in known:
            raise CheckpointError(
                f"{file}.json step {index} is '{name}', which this policy family does not have "
                f"(known: {', '.join(sorted(known | _NO_EFFECT))}). It may change the numbers, so it is not skipped: "
                "apply it outside and save the checkpoint without it"
            )
        elif name in found:
            raise CheckpointError(f"{file}.json has the step '{name}' twice; save the checkpoint again")
        else:
            found[name] = settings
    return found


def _check_cast(file: str, settings: Mapping[str, Any]) -> None:
    if settings.get("float_dtype") not in (None, "float32"):
        raise CheckpointError(
            f"{file}.json device_processor casts to {settings['float_dtype']}, which rounds state and actions; "
            "set its float_dtype to null"
        )


def _require(file: str, found: Mapping[str, Any], name: str) -> None:
    if name not in found:
        has = ", ".join(found) or "none"
        raise CheckpointError(f"{file}.json has no '{name}' step (it has: {has}); save the checkpoint again")


def _check_order(file: str, names: list[str], pairs: Sequence[tuple[str, str]]) -> None:
    for first, second in pairs:
        if first in names and second in names and names.index(first) > names.index(second):
            raise CheckpointError(f"{file}.json runs '{second}' before '{first}'; this policy needs it the other way")


def _agreed_mode(kind: str, config: Mapping[str, Any], *steps: Mapping[str, Any]) -> str:
    files = ("config.json", "policy_preprocessor.json", "policy_postprocessor.json")
    sources = (config.get("normalization_mapping") or {}, *(step.get("norm_map") or {} for step in steps))
    declared = {file: source[kind] for file, source in zip(files, sources, strict=False) if kind in source}
    if not declared:
        raise CheckpointError(f"neither config.json nor the processors name a normalisation mode for {kind}; add it")
    if len(set(declared.values())) > 1:
        said = ", ".join(f"{where} says {mode}" for where, mode in declared.items())
        raise CheckpointError(f"normalisation modes for {kind} contradict: {said}. Use the one it was trained with")
    return str(next(iter(declared.values())))


def _check_words(file: str, settings: Mapping[str, Any], name: str) -> None:
    value = settings.get(name) or {}
    if not isinstance(value, Mapping) or not all(isinstance(word, str) for word in value.values()):
        raise CheckpointError(f"{file}: {name} is {value!r}; it is an object of strings: save the checkpoint again")


def _state_mode(config: Mapping[str, Any], normalizer: Mapping[str, Any]) -> str:
    declared = {**(config.get("normalization_mapping") or {}), **(normalizer.get("norm_map") or {})}
    visual = declared.get("VISUAL", "IDENTITY")
    if visual != "IDENTITY":
        raise CheckpointError(
            f"images are normalised by {visual}; pi0 and pi05 map 0..1 to -1..1 themselves and take IDENTITY"
        )
    mode = _agreed_mode("STATE", config, normalizer)
    keys = normalizer.get("normalize_observation_keys")
    return mode if keys is None or STATE in keys else "IDENTITY"


def _agreed_eps(normalizer: Mapping[str, Any], unnormalizer: Mapping[str, Any]) -> float:
    there, back = (step.get("eps", 1e-8) for step in (normalizer, unnormalizer))
    for eps in (there, back):
        if not isinstance(eps, float | int) or not 0 <= eps < 1:
            raise CheckpointError(f"a normaliser's eps is {eps!r}; it is a small number such as 1e-8")
    if there != back:
        raise CheckpointError(f"the normaliser's eps is {there:g}, the unnormaliser's {back:g}; they must be the same")
    return float(there)


def _capacity(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    expected = {"padding_side": "right", "padding": "max_length", "task_key": "task"}
    for key, value in expected.items():
        if tokenizer.get(key, value) != value:
            raise CheckpointError(f"tokenizer_processor has {key}='{tokenizer[key]}'; this policy takes '{value}'")
    stored, declared = tokenizer.get("max_length"), config.get("tokenizer_max_length")
    if stored is not None and declared is not None and stored != declared:
        raise CheckpointError(
            f"config.json tokenizer_max_length is {declared}, policy_preprocessor.json says {stored}; make them equal"
        )
    if stored is None and declared is None:
        raise CheckpointError("config.json has no tokenizer_max_length; add the one it was trained with")
    return int(stored if stored is not None else declared)  # type: ignore[arg-type]


def _relative(
    config: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    step = before.get("relative_actions_processor", {})
    said = {
        "config.json use_relative_actions": bool(config.get("use_relative_actions", step.get("enabled", False))),
        "relative_actions_processor": bool(step.get("enabled", False)),
        "absolute_actions_processor": bool(after.get("absolute_actions_processor", {}).get("enabled", False)),
    }
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{where}={value}" for where, value in said.items())
        raise CheckpointError(f"the checkpoint contradicts itself about relative actions: {listed}; set all alike")
    return step if said["relative_actions_processor"] else None
