"""The steps in order and their inverses backwards: observation -> plan inputs, normalised chunk -> robot units."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from innerloop.contract import ObservationError, Previous
from innerloop.process.action import ActionLimits, RelativeActions, check_finite
from innerloop.process.cameras import Cameras
from innerloop.process.guidance import check, given, weights
from innerloop.process.image import ImageSpec, fitted_size, resize_bytes_with_pad, to_frame
from innerloop.process.noise import draw_noise, to_noise
from innerloop.process.state import Normalizer, discretize, pad, to_state
from innerloop.process.text import Template, Tokenizer, fit

Value = np.ndarray | tuple[np.ndarray, ...]  # an array, or one flat array a row where rows differ in length

_NO_FRAME = np.zeros((1, 1, 3), np.uint8)


@dataclass(frozen=True)
class Context:
    """What the inverse needs of the observation that produced a chunk, and what a comparison reads.

    state: robot units, [n]; normalized_state: float32 [n], as the model or its prompt takes it, unpadded.
    """

    state: np.ndarray
    prompt_tokens: int
    prompt: str
    normalized_state: np.ndarray


@dataclass(frozen=True)
class Prepared:
    """inputs: the plan's input buffers by name, without `noise`, continuing no chunk; context: for `finish`.

    `frames` is one flat uint8 array a camera, as long as its frame. It may share the caller's memory: read it before
    the caller changes the image, and do not write to it.
    """

    inputs: dict[str, Any]
    context: Context


@dataclass
class Draft:
    """One observation on its way through the steps; `images` and `given` belong to the caller and are only read.

    given: the state as it came; seen: what a step's `look` leaves for its `forward`.
    """

    images: Mapping[str, object]
    prompt: str
    given: object
    raw_state: np.ndarray = field(init=False)
    state: np.ndarray = field(init=False)
    seen: Any = None
    inputs: dict[str, Value] = field(default_factory=dict)
    tokens: int = 0
    text: str = ""


class Step(Protocol):
    """One transformation and its inverse on the actions; a step that inherits need only state what it does."""

    def look(self, draft: Draft) -> None:
        """Images towards the model, before anyone has looked at state and prompt."""
        return

    def forward(self, draft: Draft) -> None:
        """Observation towards the model."""
        return

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Actions towards the robot; a new array or the same one, never changed in place."""
        return actions

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Actions back towards the model, for the chunk of another observation; undoes `inverse`."""
        return actions


@dataclass(frozen=True)
class Pipeline:
    """`push` appends a step and puts its inverse at the front, so the inverses run backwards by construction."""

    forward: tuple[Step, ...] = ()
    inverse: tuple[Step, ...] = ()

    def push(self, step: Step) -> "Pipeline":
        """A new pipeline, one step longer."""
        return Pipeline((*self.forward, step), (step, *self.inverse))


@dataclass(frozen=True)
class LimitStep(Step):
    """Nothing on the way in; the caller's limits, last of all, on the way out."""

    limits: ActionLimits

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """The chunk within the limits, clamped or refused."""
        return self.limits.apply(actions)


@dataclass(frozen=True)
class RelativeStep(Step):
    """The model's actions are offsets from the raw state; on the way out they become absolute."""

    relative: RelativeActions

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Adds the state of the observation that produced the chunk, not of a later one."""
        return self.relative.to_absolute(actions, context.state)

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Offsets from the new observation's state."""
        return self.relative.to_relative(actions, context.state)


@dataclass(frozen=True)
class NormalizeStep(Step):
    """State to normalised; actions back to robot units."""

    state: Normalizer
    action: Normalizer

    def forward(self, draft: Draft) -> None:
        """Normalises the state."""
        draft.state = self.state.apply(draft.state)

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Un-normalises the actions."""
        return self.action.invert(actions)

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """Normalises the actions; row i takes the statistics of row i of the new chunk."""
        return self.action.rows(len(actions)).apply(actions)


@dataclass(frozen=True)
class PromptStep(Step):
    """Template and tokens; where the template has the state, its true width is written, never a padded one."""

    template: Template
    tokenizer: Tokenizer
    capacity: int

    def forward(self, draft: Draft) -> None:
        """Writes `tokens` and `prompt_length`."""
        bins = discretize(draft.state) if self.template.takes_state else None
        pieces = self.template.render(draft.prompt, bins)
        ids = self.tokenizer.ids(pieces)
        draft.inputs["tokens"] = fit(ids, self.capacity)
        draft.inputs["prompt_length"] = _integers((len(ids),))
        draft.tokens, draft.text = len(ids), "".join(pieces)


@dataclass(frozen=True)
class WidthStep(Step):
    """State padded to the model's width; actions cut to the robot's. `state_input`: the model takes a state vector."""

    state_width: int
    action_width: int
    state_input: bool

    def forward(self, draft: Draft) -> None:
        """Writes `state`, where the model takes one."""
        if self.state_input:
            draft.inputs["state"] = pad(draft.state, self.state_width)

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """The first `action_width` columns."""
        return actions[:, : self.action_width]


@dataclass(frozen=True)
class FramesStep(Step):
    """Frames by camera name, one row a slot. `host_resize`: to the model's size here, else the plan does it from any size."""

    cameras: Cameras
    spec: ImageSpec
    resolution: tuple[int, int]
    host_resize: bool = False

    def look(self, draft: Draft) -> None:
        """Writes `frames`, `frame_sizes` and `camera_mask`; a slot without a camera is one black, masked pixel."""
        matched = self.cameras.match(draft.images)
        frames = [
            _NO_FRAME if image is None else self._frame(name, image)
            for name, image in zip(self.cameras.names, matched, strict=True)
        ]
        draft.inputs["frames"] = tuple(frame.reshape(-1) for frame in frames)
        draft.inputs["frame_sizes"] = _integers(tuple(frame.shape[:2] for frame in frames))
        draft.inputs["camera_mask"] = _integers(tuple(int(image is not None) for image in matched))

    def _frame(self, name: str, image: object) -> np.ndarray:
        frame = to_frame(name, image, self.spec)
        height, width = frame.shape[:2]
        if min(fitted_size(height, width, *self.resolution)) < 1:
            raise ObservationError(
                f"camera '{name}': {height}x{width} has no pixels left when fitted into "
                f"{self.resolution[0]}x{self.resolution[1]}; send a less extreme aspect ratio"
            )
        return resize_bytes_with_pad(frame, *self.resolution) if self.host_resize else frame


@dataclass(frozen=True)
class Widths:
    """Sizes of one policy: what the robot has, what the model takes. `exact_state`: no narrower state is accepted.

    trained_delay: the longest prefix of actions that training gave, where the checkpoint says so.
    """

    state: int
    max_state: int
    action: int
    max_action: int
    chunk: int
    exact_state: bool = True
    trained_delay: int | None = None


class Processor:
    """Both directions of one checkpoint's processing. Holds no episode state, so any thread may use it."""

    def __init__(
        self, pipeline: Pipeline, cameras: Cameras, widths: Widths, state_dtype: type, facts: dict[str, Any]
    ) -> None:
        self.cameras = cameras
        self.widths = widths
        self._pipeline = pipeline
        self._state_dtype = state_dtype
        self._facts = facts
        self._lookers = [step for step in pipeline.forward if type(step).look is not Step.look]
        self._inverse = [step for step in pipeline.inverse if type(step).inverse is not Step.inverse]
        self._unguided = {
            "previous": np.zeros((widths.chunk, widths.max_action), np.float32),
            "guidance": np.zeros(widths.chunk, np.float32),
            "prefix_length": np.zeros(1, np.int32),
        }
        for zeros in self._unguided.values():
            zeros.setflags(write=False)

    def prepare(self, observation: Mapping[str, Any]) -> Prepared:
        """{"images", "state", "prompt"} -> the plan's inputs. Raises ObservationError."""
        return self.complete(self.begin(observation))

    def begin(self, observation: Mapping[str, Any]) -> Draft:
        """The inputs that images alone give, so that a device can have them before the rest. Raises ObservationError."""
        _check_keys(observation)
        draft = Draft(observation["images"], observation["prompt"], observation["state"])
        for step in self._lookers:
            step.look(draft)
        return draft

    def complete(self, draft: Draft) -> Prepared:
        """All inputs of an observation that was begun. Raises ObservationError."""
        exact = self.widths.exact_state
        draft.raw_state = draft.state = to_state(draft.given, self.widths.state, self._state_dtype, exact=exact)
        for step in self._pipeline.forward:
            step.forward(draft)
        context = Context(draft.raw_state, draft.tokens, draft.text, draft.state.astype(np.float32, copy=False))
        return Prepared({**draft.inputs, **self.guidance(None, context)}, context)

    def finish(self, normalized: np.ndarray, context: Context) -> np.ndarray:
        """The model's [chunk, max_action_dim] -> float32 [chunk, action_dim] in robot units; a new array.

        Raises NonFiniteError, and ActionLimitError where limits are set.
        """
        expected = (self.widths.chunk, self.widths.max_action)
        if normalized.shape != expected:
            raise ValueError(f"the model's chunk has shape {normalized.shape}; expected {expected}")
        check_finite(normalized, "normalised actions")
        actions = normalized
        for step in self._inverse:
            actions = step.inverse(actions, context)
        actions = np.array(actions, np.float32, order="C")
        check_finite(actions, "actions")
        return actions

    def guidance(self, previous: Previous | None, context: Context) -> dict[str, np.ndarray]:
        """The plan's inputs `previous` [chunk, max_action_dim], `guidance` [chunk] and `prefix_length` [1].

        Zeros when nothing is continued. Raises ObservationError.
        """
        if previous is None:
            return dict(self._unguided)
        widths = self.widths
        actions = check(previous, widths.action, widths.chunk)
        count = len(actions)
        for step in self._pipeline.forward:
            actions = step.again(actions, context)
        target = np.zeros((widths.chunk, widths.max_action), np.float32)
        target[:count, : widths.action] = actions
        horizon = count if previous.horizon is None else min(previous.horizon, count)
        return {
            "previous": target,
            "guidance": weights(previous.schedule, widths.chunk, previous.delay, horizon),
            "prefix_length": given(previous, horizon, widths.trained_delay),
        }

    def noise(self, noise: object = None, seed: int | None = None) -> np.ndarray:
        """float32 [chunk, max_action_dim]: the given noise, checked and copied, or drawn from the seed."""
        if noise is not None and seed is not None:
            raise ObservationError("both noise and seed were given; give one")
        if noise is not None:
            return to_noise(noise, self.widths.chunk, self.widths.max_action)
        return draw_noise(seed, self.widths.chunk, self.widths.max_action)

    def describe(self) -> dict[str, Any]:
        """Plain data: cameras, renames, image rules, modes, widths, template, tokenizer, units and notes."""
        return dict(self._facts)


@functools.lru_cache(maxsize=1024)
def _integers(values: tuple[Any, ...]) -> np.ndarray:
    """int32; made once, read-only: sizes, masks and lengths take few values."""
    array = np.array(values, np.int32)
    array.setflags(write=False)
    return array


def _check_keys(observation: Any) -> None:
    expected = ("images", "state", "prompt")
    if not isinstance(observation, Mapping):
        kind = type(observation).__name__
        raise ObservationError(f"the observation is {kind}; pass a mapping with the keys {', '.join(expected)}")
    missing = [key for key in expected if key not in observation]
    unknown = [str(key) for key in observation if key not in expected]
    if missing or unknown:
        raise ObservationError(
            f"an observation has exactly the keys {', '.join(expected)}; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    if not isinstance(observation["images"], Mapping):
        kind = type(observation["images"]).__name__
        raise ObservationError(f"observation['images'] is {kind}; pass {{camera name: image}}")
    if not isinstance(observation["prompt"], str):
        raise ObservationError(f"observation['prompt'] is {type(observation['prompt']).__name__}; pass one string")
    try:
        observation["prompt"].encode()
    except UnicodeEncodeError as error:
        raise ObservationError(f"observation['prompt'] is not valid Unicode ({error}); decode it as UTF-8") from error
