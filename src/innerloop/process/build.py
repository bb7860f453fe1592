"""A checkpoint's parsed parts -> a Processor for pi0 and pi05, everything checked before weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from innerloop.contract import CheckpointError
from innerloop.process import text
from innerloop.process.action import ActionLimits, RelativeActions
from innerloop.process.cameras import Cameras
from innerloop.process.image import MAX_HEIGHT, MAX_WIDTH, ImageSpec
from innerloop.process.pipeline import (
    FramesStep,
    LimitStep,
    NormalizeStep,
    Pipeline,
    Processor,
    PromptStep,
    RelativeStep,
    Widths,
    WidthStep,
)
from innerloop.process.recipe import STATE, Recipe, StoredStep, read_recipe
from innerloop.process.state import LEROBOT, OPENPI, Convention, Normalizer, statistic_names

ACTION = "action"
DEFAULT_RESOLUTION = (224, 224)  # openpi models/model.py IMAGE_RESOLUTION
_OPENPI_MODE = {"pi0": "MEAN_STD", "pi05": "QUANTILES"}  # openpi training/config.py: use_quantile_norm unless pi0


class Sizes(Protocol):
    """What the processing needs of a policy's sizes."""

    @property
    def family(self) -> str: ...
    @property
    def cameras(self) -> tuple[str, ...]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def max_state_dim(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...
    @property
    def prompt_capacity(self) -> int: ...


class Parts(Protocol):
    """What the processing needs of a checkpoint; weights.Checkpoint is one."""

    @property
    def path(self) -> Path: ...
    @property
    def layout(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def preprocessor(self) -> Sequence[StoredStep] | None: ...
    @property
    def postprocessor(self) -> Sequence[StoredStep] | None: ...
    @property
    def statistics(self) -> Mapping[str, Mapping[str, Any]]: ...
    @property
    def tokenizer(self) -> Path | None: ...
    @property
    def assets(self) -> str | None: ...


@dataclass(frozen=True)
class Edge:
    """What only the caller knows. rename: {robot camera: checkpoint camera}; absent: checkpoint cameras that the robot
    does not have (openpi has three slots, whatever the robot); images: how frames are laid out.

    normalization: the mode of an openpi directory trained with another than its family's, or "IDENTITY" to accept a
    checkpoint without statistics. state_dim, action_dim, relative (mask of delta dimensions), state_in_prompt (pi05):
    what an openpi directory does not say. tokenizer: a path used instead of the checkpoint's.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    absent: Sequence[str] = ()
    images: ImageSpec = field(default_factory=ImageSpec)
    normalization: str | None = None
    state_dim: int | None = None
    action_dim: int | None = None
    relative: Sequence[bool] | None = None
    state_in_prompt: bool | None = None
    limits: ActionLimits | None = None
    tokenizer: str | Path | None = None


NO_EDGE = Edge()


@dataclass(frozen=True)
class Rules:
    """Everything decided, before the steps are put together."""

    sizes: Sizes
    layout: str
    recipe: Recipe
    convention: Convention
    cameras: Cameras
    widths: Widths
    state: Normalizer
    action: Normalizer
    relative: RelativeActions | None
    template: text.Template
    tokenizer: text.Tokenizer
    resolution: tuple[int, int]
    edge: Edge
    assets: str | None
    notes: Sequence[str]
    names: Sequence[str] | None = None  # of the action dimensions


def flow_processor(sizes: Sizes, checkpoint: Parts, edge: Edge = NO_EDGE, vocabulary: int | None = None) -> Processor:
    """Raises CheckpointError or ObservationError, naming what is wrong, before any weight is read.

    `vocabulary`: rows of the embedding; a tokenizer with more ids is refused.
    """
    notes: list[str] = []
    convention, recipe = _recipe(sizes, checkpoint, edge, notes)
    state = _normalizer(checkpoint, STATE, recipe.state_mode, convention, edge, notes)
    action = _normalizer(checkpoint, ACTION, recipe.action_mode, convention, edge, notes)
    widths = _widths(sizes, checkpoint, edge, state, action)
    _check_horizon(state, action, widths)
    height, width = checkpoint.config.get("image_resolution") or DEFAULT_RESOLUTION
    return assemble(
        Rules(
            sizes=sizes,
            layout=checkpoint.layout,
            recipe=recipe,
            convention=convention,
            cameras=Cameras(sizes.cameras, edge.rename, recipe.rename, edge.absent),
            widths=widths,
            state=state.cut(widths.state),
            action=action.cut(widths.action),
            relative=_relative(recipe, edge, widths),
            template=_template(sizes.family, checkpoint, edge, notes),
            tokenizer=_tokenizer(checkpoint, edge, vocabulary),
            resolution=(int(height), int(width)),
            edge=edge,
            assets=checkpoint.assets,
            notes=notes,
            names=checkpoint.config.get("action_feature_names"),
        )
    )


def assemble(rules: Rules) -> Processor:
    """Steps in openpi's order: raw, relative, normalised, prompt, padded, frames."""
    widths, edge = rules.widths, rules.edge
    pipeline = Pipeline()
    if edge.limits is not None:
        edge.limits.check(widths.action)
        pipeline = pipeline.push(LimitStep(edge.limits))
    if rules.relative is not None:
        pipeline = pipeline.push(RelativeStep(rules.relative))
    pipeline = pipeline.push(NormalizeStep(rules.state, rules.action))
    pipeline = pipeline.push(PromptStep(rules.template, rules.tokenizer, rules.recipe.capacity))
    pipeline = pipeline.push(WidthStep(widths.max_state, widths.action, state_input=_takes_vector(rules)))
    pipeline = pipeline.push(FramesStep(rules.cameras, edge.images, rules.resolution, _resizes_on_host(rules)))
    return Processor(pipeline, rules.cameras, widths, rules.convention.dtype, _facts(rules))


def _resizes_on_host(rules: Rules) -> bool:
    return rules.convention.name == OPENPI.name  # openpi resizes bytes with Pillow, LeRobot floats inside the model


def _takes_vector(rules: Rules) -> bool:
    return rules.sizes.family == "pi0"


def _facts(rules: Rules) -> dict[str, Any]:
    """What `Processor.describe` answers: plain data."""
    cameras, widths, edge = rules.cameras, rules.widths, rules.edge
    state_input = "prompt" if rules.template.takes_state else "vector" if _takes_vector(rules) else "none"
    return {
        "family": rules.sizes.family,
        "layout": rules.layout,
        "cameras": list(cameras.required),
        "empty_cameras": list(cameras.empty),
        "rename": dict(edge.rename),
        "stored_rename": dict(cameras.stored),
        "image": {
            **vars(edge.images),
            "max_height": MAX_HEIGHT,
            "max_width": MAX_WIDTH,
            "resized_to": list(rules.resolution),
            "resized_by": "host (Pillow, as openpi)" if _resizes_on_host(rules) else "plan",
        },
        "state": {
            "width": widths.state,
            "padded": widths.max_state,
            "mode": rules.state.mode,
            "input": state_input,
        },
        "action": {
            "width": widths.action,
            "padded": widths.max_action,
            "horizon": widths.chunk,
            "mode": rules.action.mode,
            "names": rules.names,
            "relative": None if rules.relative is None else list(rules.relative.mask),
            "units": "as the model emits them (IDENTITY)" if rules.action.mode == "IDENTITY" else "robot",
            "trained_delay": widths.trained_delay,
            "limits": None if edge.limits is None else edge.limits.on_violation,
        },
        "prompt": {
            "template": rules.template.name,
            "capacity": rules.recipe.capacity,
            "tokenizer": rules.tokenizer.source,
        },
        "statistics": {"set": rules.assets, "convention": rules.convention.name, "eps": rules.convention.eps},
        "notes": list(rules.notes),
    }


def _recipe(sizes: Sizes, checkpoint: Parts, edge: Edge, notes: list[str]) -> tuple[Convention, Recipe]:
    if sizes.family not in _OPENPI_MODE:
        raise CheckpointError(f"no processing for family '{sizes.family}'; known: {', '.join(_OPENPI_MODE)}")
    if checkpoint.layout == "lerobot":
        before, after = checkpoint.preprocessor, checkpoint.postprocessor
        if before is None or after is None:
            absent = "policy_preprocessor.json" if before is None else "policy_postprocessor.json"
            raise CheckpointError(
                f"{checkpoint.path} has no {absent}, so its normalisation is unknown; copy it there, or convert the "
                "checkpoint with LeRobot's migrate_policy_normalization"
            )
        recipe = read_recipe(sizes.family, checkpoint.config, before, after)
        return replace(LEROBOT, eps=recipe.eps), recipe
    mode = edge.normalization or _OPENPI_MODE[sizes.family]
    whose = "the caller" if edge.normalization else f"openpi's default for {sizes.family}; the directory does not say"
    notes.append(f"normalisation mode {mode} comes from {whose}")
    return OPENPI, Recipe(mode, mode, OPENPI.eps, sizes.prompt_capacity)


def _normalizer(
    checkpoint: Parts, feature: str, mode: str, convention: Convention, edge: Edge, notes: list[str]
) -> Normalizer:
    found = checkpoint.statistics.get(feature)
    wanted = edge.normalization
    if wanted is not None and wanted != mode and not (wanted == "IDENTITY" and found is None):
        raise CheckpointError(
            f"normalization='{wanted}' was asked, but the checkpoint normalises '{feature}' by {mode}; leave it out"
        )
    if found is None and statistic_names(mode):
        if wanted != "IDENTITY":
            raise CheckpointError(
                f"no statistics for '{feature}' (mode {mode}); the checkpoint has statistics for: "
                f"{', '.join(sorted(checkpoint.statistics)) or 'nothing'}. Store them under '{feature}', or pass "
                "normalization='IDENTITY' if the policy really was trained without"
            )
        notes.append(f"'{feature}' is not normalised: the checkpoint has no statistics and the caller accepts that")
        mode = "IDENTITY"
    return Normalizer.from_statistics(feature, mode, found or {}, convention)


def _widths(sizes: Sizes, checkpoint: Parts, edge: Edge, state: Normalizer, action: Normalizer) -> Widths:
    inputs, outputs = (checkpoint.config.get(f"{kind}_features") or {} for kind in ("input", "output"))
    state_width = _width(STATE, inputs.get(STATE), edge.state_dim, state.width, sizes.max_state_dim)
    action_width = _width(ACTION, outputs.get(ACTION), edge.action_dim, action.width, sizes.max_action_dim)
    # Only where nothing tells the robot's width from the model's padding may a state be narrower.
    known = edge.state_dim is not None or state.width is not None or state_width < sizes.max_state_dim
    return Widths(
        state_width, sizes.max_state_dim, action_width, sizes.max_action_dim, sizes.chunk, exact_state=known,
        trained_delay=_trained_delay(checkpoint.config),
    )  # fmt: skip


def _trained_delay(config: Mapping[str, Any]) -> int | None:
    """The longest prefix of actions that training gave (LeRobot policies/pi05 rtc_training_max_delay, after 0.6.1)."""
    found = config.get("rtc_training_max_delay")
    if found is not None and (not isinstance(found, int) or found < 0):
        raise CheckpointError(
            f"config.json rtc_training_max_delay is {found!r}; it counts actions, 0 where none are given"
        )
    return found


def _width(feature: str, declared: Any, asked: int | None, statistics: int | None, padded: int) -> int:
    """The robot's width. LeRobot keeps a base model's padded width in input_features when it fine-tunes: then the
    statistics know better."""
    stored = int(declared["shape"][0]) if declared else None
    if stored == padded and statistics is not None:
        stored = None
    if stored is not None and statistics is not None and stored != statistics:
        raise CheckpointError(
            f"config.json says '{feature}' has {stored} values, its statistics cover {statistics}; make them agree"
        )
    known = stored if stored is not None else statistics
    if asked is not None and declared and known is not None and asked != known:
        raise CheckpointError(f"'{feature}' was asked with {asked} values, the checkpoint has {known}; leave it out")
    width = asked or known or padded
    if not 0 < width <= (known or padded) or width > padded:
        raise CheckpointError(
            f"'{feature}' with {width} values does not fit: the model takes {padded}, the statistics cover {statistics}"
        )
    return width


def _check_horizon(state: Normalizer, action: Normalizer, widths: Widths) -> None:
    if state.horizon is not None:
        raise CheckpointError(f"'{STATE}' has statistics per step {state.offset.shape}; a state has one: store [dim]")
    if action.horizon not in (None, widths.chunk):
        raise CheckpointError(f"'{ACTION}' has statistics for {action.horizon} steps, the chunk has {widths.chunk}")


def _relative(recipe: Recipe, edge: Edge, widths: Widths) -> RelativeActions | None:
    stored = recipe.relative
    if stored is not None and edge.relative is not None:
        raise CheckpointError("relative= was given, but the checkpoint has its own relative step; leave it out")
    if stored is not None:
        names = stored.get("action_names")
        relative = RelativeActions.excluding(stored.get("exclude_joints") or (), names, widths.action)
    elif edge.relative is not None:
        relative = RelativeActions(tuple(bool(flag) for flag in edge.relative))
    else:
        return None
    relative.check(widths.state, widths.action)
    return relative


def _tokenizer(checkpoint: Parts, edge: Edge, vocabulary: int | None) -> text.Tokenizer:
    path = edge.tokenizer if edge.tokenizer is not None else checkpoint.tokenizer
    tokenizer = text.Tokenizer.open(path, checkpoint.path)
    if vocabulary is not None and tokenizer.size > vocabulary:
        raise CheckpointError(
            f"{tokenizer.source} has {tokenizer.size} tokens, the embedding {vocabulary}: another model's tokenizer"
        )
    return tokenizer


def _template(family: str, checkpoint: Parts, edge: Edge, notes: list[str]) -> text.Template:
    lerobot = checkpoint.layout == "lerobot"
    if edge.state_in_prompt is not None and (lerobot or family == "pi0"):
        raise CheckpointError(
            "state_in_prompt= is for pi05 in an openpi directory; this checkpoint settles it: leave it out"
        )
    if family == "pi0":
        return text.LINE if lerobot else text.CLEANED_LINE
    if lerobot:
        return text.TASK_AND_STATE
    # openpi models/pi0_config.py discrete_state_input: true for pi05 by default, false in its pi05_libero.
    stored = checkpoint.config.get("discrete_state_input")
    if stored not in (None, True, False):
        raise CheckpointError(f"config.json discrete_state_input is {stored!r}; it is true or false")
    if None not in (stored, edge.state_in_prompt) and stored != edge.state_in_prompt:
        raise CheckpointError(
            f"state_in_prompt={edge.state_in_prompt} was asked, config.json says discrete_state_input={stored}; leave it out"
        )
    if stored is None and edge.state_in_prompt is None:
        notes.append(
            "the state is written into the prompt, openpi's default for pi05; pi05_libero: state_in_prompt=False"
        )
    spoken = next((said for said in (stored, edge.state_in_prompt) if said is not None), True)
    return text.TASK_AND_STATE if spoken else text.CLEANED_LINE
