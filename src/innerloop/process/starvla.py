"""starVLA: observation -> chat turn and patches; normalised actions -> robot units, as its policy server does it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from innerloop.contract import CheckpointError, ObservationError, Previous
from innerloop.process.build import ACTION, Edge
from innerloop.process.cameras import Cameras
from innerloop.process.fast import FastTokenizer
from innerloop.process.image import ImageSpec, to_frame
from innerloop.process.pipeline import Context, Draft, LimitStep, Pipeline, Processor, Step, Widths, WidthStep
from innerloop.process.qwen3vl import ChatTokenizer, Encoder, ImageRules, Slots, Special
from innerloop.process.recipe import STATE
from innerloop.process.state import discretize
from innerloop.process.synthetic import token_a_word
from innerloop.weights import Checkpoint
from innerloop.weights.starvla import base_model, data_section, section

FIRST_ACTION, END = "<robot_action_0>", "<|im_end|>"
PLACEHOLDER = "\U0001f50d"  # starVLA QwenOFT.py action_token
STATE_LIMIT = 2.2  # starVLA transform/state_action.py clamps what q99 normalises
THRESHOLD = 0.5
STATISTICS = {"q99": ("q01", "q99"), "min_max": ("min", "max"), "mean_std": ("mean", "std")}
MODES = (*STATISTICS, "none")


@dataclass(frozen=True)
class Robot:
    """What a run's data has: cameras in training order, how values were normalised.

    gripper_raw: the last action dimension was not.
    """

    cameras: tuple[str, ...]
    action: str
    state: str = "none"
    gripper_raw: bool = False


# The data sets' own names for their cameras and how their values were normalised are in starVLA's code, not in a run:
# examples/simBenchmarks/*/train_files/data_registry/data_config.py.
ROBOTS = {
    "oxe_bridge": Robot(("image_0",), "q99", "q99"),
    "oxe_rt1": Robot(("image",), "q99", "q99"),
    "libero": Robot(("primary_image", "wrist_image"), "min_max", gripper_raw=True),
}


def read_robot(run: Mapping[str, Any], tag: str) -> Robot:
    """From the run's own `innerloop` section, else from what is known of its data. Raises CheckpointError."""
    mix, own = data_section(run).text("data_mix", ""), section(run, "innerloop").values
    known = ROBOTS.get("libero" if mix.startswith("libero") else tag)
    if known is None and not {"cameras", "action"} <= set(own):
        raise CheckpointError(
            f"a starVLA run does not say which cameras it was trained with nor how values were normalised, and data set "
            f"'{tag}' (data_mix '{mix}') is not known: add to config.yaml\n"
            f"  innerloop: {{cameras: [names in training order], action: MODE, state: MODE}}\nMODE is one of "
            f"{', '.join(MODES)}; gripper: none where the last action dimension was not normalised"
        )
    robot = known or Robot((), "none")
    named = own.get("cameras", list(robot.cameras))
    if not isinstance(named, list):
        raise CheckpointError(f"config.yaml innerloop: cameras is {named!r}; it takes a list, as [front, wrist]")
    cameras, action = tuple(str(name) for name in named), own.get("action", robot.action)
    state, gripper = own.get("state", robot.state), own.get("gripper", "none" if robot.gripper_raw else "mask")
    if not cameras or action not in MODES or state not in MODES or gripper not in ("mask", "none"):
        raise CheckpointError(
            f"config.yaml innerloop: cameras {list(cameras)}, action '{action}', state '{state}', gripper '{gripper}'; "
            f"cameras are names, action and state one of {', '.join(MODES)}, gripper mask or none"
        )
    return Robot(cameras, action, state, gripper == "none")


class Sizes(Protocol):
    """What the processing needs of a run's configuration."""

    @property
    def framework(self) -> str: ...
    @property
    def robot(self) -> Robot: ...
    @property
    def rules(self) -> ImageRules: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def image_size(self) -> tuple[int, int] | None: ...
    @property
    def template(self) -> str | None: ...
    @property
    def chunk(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...
    @property
    def state_dim(self) -> int: ...
    @property
    def state_token(self) -> bool: ...
    @property
    def state_in_text(self) -> bool: ...


@dataclass(frozen=True)
class Scale:
    """One feature's statistics: low and high for a range mode, mean and deviation for mean_std; mask: what it covers."""

    mode: str
    low: np.ndarray
    high: np.ndarray
    binary: np.ndarray

    @classmethod
    def of(cls, mode: str, stats: Mapping[str, np.ndarray], feature: str, gripper_raw: bool) -> "Scale":
        """From dataset_statistics.json. Raises CheckpointError where it lacks what the mode needs."""
        if mode == "none":
            return cls(mode, np.zeros(0), np.zeros(0), np.zeros(0, bool))
        if mode not in STATISTICS:
            raise CheckpointError(f"'{feature}' cannot be normalised by '{mode}'; a starVLA run has {', '.join(MODES)}")
        names = STATISTICS[mode]
        absent = [name for name in names if name not in stats]
        if absent:
            raise CheckpointError(
                f"dataset_statistics.json has no {' and '.join(absent)} of '{feature}', which is normalised by {mode}"
            )
        low, high = (np.asarray(stats[name], np.float32) for name in names)
        mask = np.asarray(stats.get("mask", np.ones(low.shape, bool)), bool)
        if low.ndim != 1 or not low.shape == high.shape == mask.shape:
            raise CheckpointError(
                f"dataset_statistics.json '{feature}': {names[0]} has shape {low.shape}, {names[1]} {high.shape}, mask "
                f"{mask.shape}; each is one number, or flag, a dimension"
            )
        binary = ~mask
        if gripper_raw:
            low, high = low.copy(), high.copy()
            low[-1], high[-1] = (0.0, 1.0) if mode == "mean_std" else (-1.0, 1.0)
        return cls(mode, low, high, binary)

    @property
    def width(self) -> int:
        """Dimensions covered, 0 without statistics."""
        return len(self.low)

    @functools.cached_property
    def _half(self) -> np.ndarray:
        """Half a range: (x + 1) / 2 * span is (x + 1) * (span / 2) bit for bit."""
        half: np.ndarray = (self.high - self.low) / np.float32(2)
        return half

    @functools.cached_property
    def _divisor(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Deviation or half range, 1 where it is 0; and where that is, None for nowhere."""
        spread = self.high if self.mode == "mean_std" else self._half
        none = spread == 0
        return np.where(none, np.float32(1), spread), none if none.any() else None

    @functools.cached_property
    def _switches(self) -> np.ndarray | None:
        return self.binary if self.binary.any() else None

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Robot units -> normalised, float32. A range of zero gives 0 for min_max, the value itself otherwise."""
        if self.mode == "none":
            return values.astype(np.float32)
        divisor, none = self._divisor
        scaled = (values - self.low) / divisor
        if self.mode != "mean_std":
            scaled -= 1
        if none is not None:
            scaled = np.where(none, 0 if self.mode == "min_max" else values, scaled)
        if self.mode == "q99":
            scaled = np.clip(scaled, -STATE_LIMIT, STATE_LIMIT)
        return self._switched(values, scaled)

    def invert(self, values: np.ndarray) -> np.ndarray:
        """Normalised -> robot units; a masked dimension is a switch."""
        if self.mode == "none":
            return values
        if self.mode == "mean_std":
            return self._switched(values, values * self.high + self.low)
        return self._switched(values, (values + 1) * self._half + self.low)

    def _switched(self, values: np.ndarray, scaled: np.ndarray) -> np.ndarray:
        if self._switches is not None:
            scaled = np.where(self._switches, values > THRESHOLD, scaled)
        return scaled.astype(np.float32, copy=False)


@dataclass(frozen=True)
class ScaleStep(Step):
    """State to normalised; actions back to robot units."""

    state: Scale
    action: Scale

    def forward(self, draft: Draft) -> None:
        """Normalises the state."""
        draft.state = self.state.apply(draft.state)

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Un-normalises the actions."""
        return self.action.invert(actions)

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Normalises the actions."""
        return self.action.apply(actions)


@dataclass(frozen=True)
class TurnStep(Step):
    """Frames and instruction -> one chat turn."""

    config: Sizes
    cameras: Cameras
    spec: ImageSpec
    encoder: Encoder

    def look(self, draft: Draft) -> None:
        """Writes the inputs of the vision stages."""
        matched = zip(self.cameras.names, self.cameras.match(draft.images), strict=True)
        frames = [self._resized(to_frame(name, image, self.spec)) for name, image in matched if image is not None]
        draft.seen = [self.encoder.cut(frame) for frame in frames]
        draft.inputs |= self.encoder.pictures(draft.seen)

    def forward(self, draft: Draft) -> None:
        """Writes the other inputs of blocks.qwen3_vl, and what the encoder derives from them."""
        draft.text = self.text(draft.prompt, draft.state)
        encoded = self.encoder.turn(draft.seen, draft.text)
        draft.inputs |= encoded.inputs
        draft.tokens = encoded.tokens

    def text(self, instruction: str, state: np.ndarray) -> str:
        """The user's turn: state as bins, QwenOFT's placeholders, then the run's template around both."""
        if self.config.state_in_text:
            instruction = f"{instruction} [STATE] {' '.join(map(str, discretize(state)))} [ACTION]"
        if self.config.framework == "QwenOFT":
            slots = PLACEHOLDER * self.config.chunk
            instruction += f" Please predict the next {self.config.chunk} robot actions: <action>{slots}<action>."
        if self.config.template is None:
            return instruction
        return self.config.template.replace("{instruction}", instruction)

    def _resized(self, frame: np.ndarray) -> np.ndarray:
        size = self.config.image_size
        if size is None or frame.shape[:2] == size[::-1]:
            return frame
        return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))


Parts = tuple[Pipeline, Cameras, Widths, type, dict[str, Any]]  # what a Processor is made of


class StarVlaProcessor(Processor):
    """Both directions of one run's processing."""

    def guidance(self, previous: Previous | None, context: Context) -> dict[str, np.ndarray]:
        """Nothing: starVLA guides a chunk by another rule (a gradient through the head), which is not offered."""
        if previous is not None:
            raise ObservationError("a starVLA policy cannot continue a previous chunk: call it without previous=")
        return {}


class AnswerProcessor(StarVlaProcessor):
    """QwenFast's: the model's output is the ids of its answer, [answer] int32, and actions are read from them."""

    def __init__(self, parts: Parts, fast: FastTokenizer, first: int, ends: frozenset[int]) -> None:
        super().__init__(*parts)
        self._fast, self._first, self._ends = fast, first, ends

    def finish(self, normalized: np.ndarray, context: Context) -> np.ndarray:
        """ids -> float32 [chunk, action_dim] in robot units. Raises AnswerError; starVLA would send zeros instead."""
        ids = normalized.tolist()
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids))
        fast = [token - self._first for token in ids[:end] if 0 <= token - self._first < self._fast.size]
        return super().finish(self._fast.actions(fast, self.widths.chunk, self.widths.max_action), context)


def processor(config: Sizes, checkpoint: Checkpoint, edge: Edge) -> Processor:
    """From a run directory. Raises CheckpointError before weights are read."""
    if edge.relative is not None or edge.state_in_prompt is not None:
        raise CheckpointError("relative and state_in_prompt do not apply to a starVLA run: leave them out")
    stats = checkpoint.statistics
    state = Scale.of(config.robot.state, stats.get(STATE, {}), "state", gripper_raw=False)
    action = Scale.of(
        edge.normalization or config.robot.action, stats.get(ACTION, {}), "action", config.robot.gripper_raw
    )
    if action.width not in (0, config.max_action_dim):
        raise CheckpointError(
            f"dataset_statistics.json covers {action.width} action dimensions, config.yaml says action_dim "
            f"{config.max_action_dim}"
        )
    _, place = base_model(checkpoint.path, checkpoint.config)
    files = [checkpoint.tokenizer, place and place / "tokenizer.json"]
    file = Path(edge.tokenizer) if edge.tokenizer else next((path for path in files if path and path.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"no tokenizer.json in {checkpoint.path}: put that of its Qwen3-VL there, or pass tokenizer='path/to/it'"
        )
    tokenizer = ChatTokenizer.open(file / "tokenizer.json" if file.is_dir() else file)
    width = edge.state_dim or state.width or len(next(iter(stats.get(STATE, {}).values()), [])) or config.state_dim
    parts = _parts(config, edge, (state, action), tokenizer, width)
    if config.framework != "QwenFast":
        return StarVlaProcessor(*parts)
    first = tokenizer.ids(FIRST_ACTION)
    if len(first) != 1:
        raise CheckpointError(
            f"{file} has no token {FIRST_ACTION}: use the tokenizer.json that the run was trained with"
        )
    return AnswerProcessor(parts, FastTokenizer.open(checkpoint.path / "fast"), first[0], frozenset(tokenizer.ids(END)))


def synthetic(config: Sizes, vocabulary: int) -> Processor:
    """For random weights: one token a word, values as they are."""
    special = Special(vocabulary - 3, vocabulary - 2, vocabulary - 1)

    def encode(text: str) -> list[int]:
        spaced = text.replace(PLACEHOLDER, f" {PLACEHOLDER} ").replace("<|", " <|")
        return token_a_word(spaced, vocabulary - 3)

    none = Scale.of("none", {}, "", gripper_raw=False)
    tokenizer = ChatTokenizer(encode, lambda ids: " ".join(map(str, ids)), special)
    parts = _parts(config, Edge(), (none, none), tokenizer, config.state_dim or config.max_action_dim)
    if config.framework != "QwenFast":
        return StarVlaProcessor(*parts)
    # random weights answer nothing that means a chunk: any answer is read as the chunk of its first ids
    size = config.chunk * config.max_action_dim
    fast = FastTokenizer(lambda ids: "".join(chr(32 + i % 64) for i in (ids * size)[:size]), vocabulary, 10.0, -64)
    return AnswerProcessor(parts, fast, 0, frozenset())


def _parts(config: Sizes, edge: Edge, scales: tuple[Scale, Scale], tokenizer: ChatTokenizer, state_width: int) -> Parts:
    cameras = Cameras(config.robot.cameras, edge.rename, absent=edge.absent)
    action = edge.action_dim or config.max_action_dim
    if config.state_dim and state_width != config.state_dim:
        raise CheckpointError(f"the head takes a state of {config.state_dim} values, the statistics have {state_width}")
    needed = bool(config.state_dim) or config.state_in_text
    widths = Widths(max(state_width, 1), max(state_width, 1), action, config.max_action_dim, config.chunk, needed)
    encoder = Encoder(tokenizer, config.rules, config.slots)
    if config.framework == "QwenOFT":
        derived = functools.partial(_query_rows, placeholder=_placeholder(tokenizer, config.chunk), chunk=config.chunk)
        encoder = Encoder(tokenizer, config.rules, config.slots, derived=derived)
    turn = TurnStep(config, cameras, edge.images, encoder)
    pipeline = Pipeline()
    if edge.limits is not None:
        edge.limits.check(action)
        pipeline = pipeline.push(LimitStep(edge.limits))
    pipeline = pipeline.push(WidthStep(config.state_dim, action, state_input=False))
    pipeline = pipeline.push(ScaleStep(*scales))
    if config.state_token:
        pipeline = pipeline.push(WidthStep(config.state_dim, config.max_action_dim, state_input=True))
    return pipeline.push(turn), cameras, widths, np.float32, _facts(config, turn, scales, widths)


def _placeholder(tokenizer: ChatTokenizer, chunk: int) -> int:
    """The id that QwenOFT's head reads. Raises CheckpointError where a chunk of placeholders has it fewer times."""
    ids = tokenizer.ids(PLACEHOLDER * chunk)
    if ids.count(ids[0]) != chunk:
        raise CheckpointError(
            f"tokenizer.json makes {ids.count(ids[0])} tokens of {chunk} placeholders ({PLACEHOLDER}): use the "
            "tokenizer.json that the run was trained with"
        )
    return ids[0]


def _query_rows(ids: np.ndarray, placeholder: int, chunk: int) -> dict[str, np.ndarray]:
    """Where QwenOFT's head reads: the last placeholders of a turn."""
    return {"query_rows": np.flatnonzero(ids == placeholder)[-chunk:].astype(np.int32)}


def _facts(config: Sizes, turn: TurnStep, scales: Sequence[Scale], widths: Widths) -> dict[str, Any]:
    then = "Qwen3-VL smart resize, in the plan"
    resize = {"resized_to": config.image_size, "resized_by": "host", "then": then}
    return {
        "family": config.framework,
        "cameras": list(turn.cameras.required),
        "image": {**vars(turn.spec), **resize},
        "state": {
            "width": widths.state,
            "mode": scales[0].mode,
            "input": "prompt" if config.state_in_text else "vector" if config.state_dim else "none",
        },
        "action": {"width": widths.action, "horizon": widths.chunk, "mode": scales[1].mode},
        "prompt": {
            "template": config.template,
            "capacity": config.slots.tokens,
            "tokenizer": turn.encoder.tokenizer.source,
        },
    }
