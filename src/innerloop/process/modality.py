"""State and actions as groups of named dimensions, each scaled by statistics of its own (GR00T's modality keys)."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from innerloop.contract import CheckpointError
from innerloop.process.pipeline import Context, Draft, Step
from innerloop.process.state import pad
from innerloop.weights.embodiments import Embodiment

Scale = Literal["range", "deviation", "angle"]
Relative = Literal["", "offset", "pose"]
POSE = 9  # xyz and the first two rows of a rotation


@dataclass(frozen=True)
class Group:
    """One key. first, second: low and high of a range, or mean and deviation; [width] or [horizon, width], float32.

    `angle` stands for sine and cosine. relative: actions are offsets from the state's dimensions [reference, reference +
    width), or poses in the frame of that one.
    """

    key: str
    width: int
    scale: Scale
    first: np.ndarray
    second: np.ndarray
    relative: Relative = ""
    reference: int = 0

    @functools.cached_property
    def _still(self) -> np.ndarray | None:
        """Dimensions that never moved, None where all did (Isaac-GR00T data/utils.py)."""
        still = self.second == 0 if self.scale == "deviation" else np.isclose(self.second, self.first)
        return still if still.any() else None

    @functools.cached_property
    def _divisor(self) -> np.ndarray:
        """Half a range, which is exact, or the deviation; 1 where nothing is divided."""
        spread = self.second if self.scale == "deviation" else self._half
        return spread if self._still is None else np.where(self._still, np.float32(1), spread)

    @functools.cached_property
    def _half(self) -> np.ndarray:
        half: np.ndarray = (self.second - self.first) * np.float32(0.5)
        return half

    def rows(self, count: int) -> "Group":
        """The same with statistics for the first `count` steps, where each step has its own."""
        if self.first.ndim == 1 or len(self.first) == count:
            return self
        return replace(self, first=self.first[:count], second=self.second[:count])

    def normalize(self, values: np.ndarray, clip: bool) -> np.ndarray:
        """[..., width] in robot units -> what the model takes; a range of no extent gives 0 (Isaac-GR00T data/utils.py)."""
        if self.scale == "angle":
            return np.concatenate([np.sin(values), np.cos(values)], axis=-1)
        scaled: np.ndarray = (values - self.first) / self._divisor
        if self.scale == "deviation":
            return scaled if self._still is None else np.where(self._still, values, scaled)
        scaled -= np.float32(1)
        if self._still is not None:
            scaled = np.where(self._still, np.float32(0), scaled)
        return scaled.clip(-1, 1) if clip else scaled

    def restore(self, values: np.ndarray) -> np.ndarray:
        """[T, width] of the model -> robot units; the model's range is clipped to [-1, 1] first."""
        one = self.rows(len(values))
        if one.scale == "deviation":
            spread: np.ndarray = values * one.second + one.first
            return spread if one._still is None else np.where(one._still, values, spread)
        scaled: np.ndarray = values.clip(-1, 1)
        scaled += np.float32(1)
        scaled *= one._half
        scaled += one.first
        return scaled

    def relate(self, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The inverse of `absolute`."""
        if not self.relative:
            return values
        origin = state[self.reference : self.reference + self.width]
        return values - origin if self.relative == "offset" else _compose(origin, values, back=True)

    def absolute(self, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[T, width] of this group, relative to the robot's state [n] -> absolute."""
        if not self.relative:
            return values
        origin = state[self.reference : self.reference + self.width]
        return values + origin if self.relative == "offset" else _compose(origin, values)


Placed = tuple[slice, Group]  # and its columns


@dataclass(frozen=True)
class GroupStep(Step):
    """State and actions by modality key. horizon: actions of a chunk that the robot was trained with."""

    states: tuple[Group, ...]
    actions: tuple[Group, ...]
    horizon: int
    clip: bool
    width: int

    @functools.cached_property
    def _read(self) -> list[Placed]:
        return _joined(self.states)

    @functools.cached_property
    def _written(self) -> list[Placed]:
        return _joined(self.actions)

    @functools.cached_property
    def _whole(self) -> list[Placed]:
        """The same for a whole chunk."""
        return [(place, one.rows(self.horizon)) for place, one in self._written]

    @functools.cached_property
    def _moved(self) -> list[Placed]:
        """Actions that are relative."""
        return [(place, one) for place, one in _placed(self.actions) if one.relative]

    def forward(self, draft: Draft) -> None:
        """Writes `state`."""
        draft.state = _beside([one.normalize(draft.state[place], self.clip) for place, one in self._read])
        draft.inputs["state"] = pad(draft.state, self.width)

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """float32 [horizon, widths of all groups]."""
        out = _beside([one.restore(actions[: self.horizon, place]) for place, one in self._whole])
        for place, one in self._moved:
            out[:, place] = one.absolute(out[:, place], context.state)
        return out

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """[n, widths of all groups] in robot units -> normalised for the new observation."""
        related = actions.copy()
        for place, one in self._moved:
            related[:, place] = one.relate(related[:, place], context.state)
        return _beside([one.rows(len(related)).normalize(related[:, place], self.clip) for place, one in self._written])


def _placed(groups: Sequence[Group]) -> list[Placed]:
    """One after another."""
    ends = np.cumsum([one.width for one in groups]).tolist()
    return [(slice(end - one.width, end), one) for end, one in zip(ends, groups, strict=True)]


def _joined(groups: Sequence[Group]) -> list[Placed]:
    """Neighbours of one scale as one group, by itself not relative: fewer and longer operations, the same numbers."""
    found: list[Placed] = []
    for place, one in _placed(groups):
        last = found[-1][1] if found else None
        if last is None or one.scale == "angle" or (last.scale, _steps(last)) != (one.scale, _steps(one)):
            found.append((place, replace(one, relative="")))
            continue
        first, second = (np.concatenate(pair, axis=-1) for pair in ((last.first, one.first), (last.second, one.second)))
        joined = replace(last, width=last.width + one.width, first=first, second=second)
        found[-1] = slice(found[-1][0].start, place.stop), joined
    return found


def _steps(one: Group) -> tuple[int, ...]:
    return one.first.shape[:-1]


def _beside(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class GripperStep(Step):
    """LIBERO's gripper: open fraction -> -1 (open) or 1."""

    column: int

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """A new array."""
        out = actions.copy()
        out[:, self.column] = -np.sign(2.0 * out[:, self.column] - 1.0)
        return out

    def again(self, actions: np.ndarray, context: Context) -> np.ndarray:
        """-1 or 1 -> the nearest open fraction."""
        out = actions.copy()
        out[:, self.column] = (1.0 - np.sign(out[:, self.column])) / 2.0
        return out


def states(found: Embodiment) -> list[Group]:
    """The groups of a robot's state, in order. Raises CheckpointError."""
    part, known = found.modality.get("state") or {}, found.statistics.get("state") or {}
    angles = part.get("sin_cos_embedding_keys") or () if found.settings.get("apply_sincos_state_encoding") else ()
    return [
        _group(f"state.{key}", known.get(key), "angle" if key in angles else _scale(part, key), _bounds(found))
        for key in part.get("modality_keys") or ()
    ]


def actions(found: Embodiment) -> list[Group]:
    """The groups of its actions, in order. Raises CheckpointError."""
    part = found.modality.get("action") or {}
    settings = part.get("action_configs") or []
    starts, at = {}, 0
    for one in states(found):
        starts[one.key], at = at, at + one.width
    made = []
    for place, key in enumerate(part.get("modality_keys") or ()):
        one = settings[place] if place < len(settings) else {}
        relative = found.settings.get("use_relative_action") and _word(one.get("rep")) == "relative"
        if not relative:
            made.append(_group(f"action.{key}", _known(found, "action", key), _scale(part, key), _bounds(found)))
            continue
        origin = one.get("state_key") or key
        if not isinstance(origin, str) or origin not in starts:
            raise CheckpointError(f"action '{key}' is relative to the state '{origin}', which the state does not have")
        # Relative actions are bounded by their extremes even where the rest is by quantiles (Isaac-GR00T).
        where, known = f"relative_action.{key}", _known(found, "relative_action", key)
        made.append(_group(where, known, _scale(part, key), ("min", "max"), _relative(key, one), starts[origin]))
    return made


def gripper(found: Embodiment, actions: Sequence[Group]) -> int | None:
    """Column of a gripper to turn round, where the checkpoint says so: LeRobot writes it down for LIBERO."""
    if not (found.settings.get("action_decode_transform") or found.settings.get("libero_gripper_action")):
        return None
    keys = [one.key for one in actions]
    if "gripper" not in keys:
        return sum(one.width for one in actions) - 1
    return sum(one.width for one in actions[: keys.index("gripper")])


def _group(
    where: str, statistics: Mapping[str, Any] | None, scale: Scale, bounds: tuple[str, str], relative: Relative = "",
    reference: int = 0,
) -> Group:  # fmt: skip
    """One key from its statistics; bounds: which two of them make a range. Raises CheckpointError."""
    wanted = ("mean", "std") if scale == "deviation" else bounds
    absent = [name for name in wanted if name not in (statistics or {})]
    if statistics is None or absent:
        raise CheckpointError(f"statistics of '{where}': {', '.join(absent)} are missing; compute them again")
    first, second = (np.asarray(statistics[name], np.float32) for name in wanted)
    if first.ndim not in (1, 2) or first.shape != second.shape or not first.size:
        raise CheckpointError(
            f"statistics of '{where}': {wanted[0]} has shape {first.shape}, {wanted[1]} {second.shape}"
        )
    if relative == "pose" and first.shape[-1] != POSE:
        raise CheckpointError(f"'{where}' is a relative pose of {first.shape[-1]} numbers; xyz+rot6d has {POSE}")
    return Group(where.rpartition(".")[2], first.shape[-1], scale, first, second, relative, reference)


def _compose(origin: np.ndarray, poses: np.ndarray, back: bool = False) -> np.ndarray:
    """Poses [T, 9] in the frame of `origin` [9] -> in the world's, or back; float32 (Isaac-GR00T state_action/pose.py)."""
    base, turned, place = _rotation(origin), _rotation(poses), poses[:, :3].astype(np.float64)
    moved = (place - origin[:3]) @ base if back else place @ base.T + origin[:3]
    rows = ((base.T if back else base) @ turned)[:, :2].reshape(len(poses), 6)
    return np.concatenate([moved, rows], axis=1).astype(np.float32)


def _rotation(pose: np.ndarray) -> np.ndarray:
    """[..., 9] -> [..., 3, 3]: the two rows made orthonormal, and the third."""
    rows = pose[..., 3:].astype(np.float64)
    first = rows[..., :3] / np.linalg.norm(rows[..., :3], axis=-1, keepdims=True)
    second = rows[..., 3:] - (first * rows[..., 3:]).sum(-1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def _relative(key: str, settings: Mapping[str, Any]) -> Relative:
    kind, form = _word(settings.get("type")), _word(settings.get("format"))
    if kind == "non_eef":
        return "offset"
    if kind == "eef" and form in ("xyz_rot6d", "xyz+rot6d"):
        return "pose"
    raise CheckpointError(
        f"action '{key}' is relative with type {kind} and format {form}; only poses xyz+rot6d are known"
    )


def _known(found: Embodiment, modality: str, key: str) -> Mapping[str, Any] | None:
    return (found.statistics.get(modality) or {}).get(key)


def _bounds(found: Embodiment) -> tuple[str, str]:
    return ("q01", "q99") if found.settings.get("use_percentiles") else ("min", "max")


def _scale(part: Mapping[str, Any], key: str) -> Scale:
    return "deviation" if key in (part.get("mean_std_embedding_keys") or ()) else "range"


def _word(value: object) -> str:
    return str(value).rpartition(".")[2].lower()
