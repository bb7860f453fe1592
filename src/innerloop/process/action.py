"""Actions on their way to the robot: relative to absolute, limits, finite or refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from innerloop.contract import CheckpointError, InnerloopError, NonFiniteError


class ActionLimitError(InnerloopError):
    """A chunk exceeds the limits that the caller set; no action is returned."""


class LimitsError(InnerloopError, ValueError):
    """Limits that cannot be used: of another robot, or without meaning."""


@dataclass(frozen=True)
class RelativeActions:
    """Dimensions whose actions are offsets from the state of the observation that produced the whole chunk.

    `mask` may be shorter than the action; the rest is absolute (openpi DeltaActions, LeRobot RelativeActions).
    """

    mask: tuple[bool, ...]

    @classmethod
    def excluding(cls, joints: Sequence[str], names: Sequence[str] | None, width: int) -> "RelativeActions":
        """All but the dimensions whose name contains one of `joints`; all of them when the names are not known."""
        tokens = [str(joint).lower() for joint in joints if joint]
        named = [str(name).lower() for name in (names or ())[:width]]
        mask = [not any(token in name for token in tokens) for name in named]
        return cls(tuple(mask + [True] * (width - len(mask))))

    def check(self, state_width: int, action_width: int) -> None:
        """Raises CheckpointError when a relative dimension has no state to start from."""
        if len(self.mask) > min(state_width, action_width):
            raise CheckpointError(
                f"relative actions cover {len(self.mask)} dimensions, but the state has {state_width} and the action "
                f"{action_width}; give a mask that fits both"
            )

    def to_relative(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[T, dim] absolute -> offsets from `state`; a new array."""
        return self._shifted(actions, state, -1)

    def to_absolute(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """[T, dim] offsets from `state` -> absolute; a new array. The inverse of `to_relative`."""
        return self._shifted(actions, state, 1)

    def _shifted(self, actions: np.ndarray, state: np.ndarray, sign: int) -> np.ndarray:
        out = actions.copy()
        width = len(self.mask)
        out[..., :width] += sign * np.where(self.mask, state[:width], 0).astype(out.dtype)
        return out


class Violation(NamedTuple):
    """One value beyond a limit. kind: position, step or jerk; row: of the chunk; bound: the limit it broke."""

    kind: str
    row: int
    joint: int
    value: float
    bound: float


@dataclass(frozen=True)
class ActionLimits:
    """Bounds in robot units: position [dim, 2]; step |a[t+1]-a[t]| [dim]; jerk |third difference| [dim].

    `on_violation`: "reject" raises ActionLimitError, "clamp" moves the values inside. Jerk can only be rejected.
    """

    position: np.ndarray | None = None
    step: np.ndarray | None = None
    jerk: np.ndarray | None = None
    on_violation: Literal["reject", "clamp"] = "reject"

    def __post_init__(self) -> None:
        for name in ("position", "step", "jerk"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, np.float32))
                if np.isnan(getattr(self, name)).any():
                    raise LimitsError(f"action limit '{name}' holds NaN, which bounds nothing; use infinity for none")
        if self.on_violation not in ("reject", "clamp"):
            raise LimitsError(f"on_violation is '{self.on_violation}'; it is reject or clamp")
        if self.on_violation == "clamp" and self.jerk is not None:
            raise LimitsError("a jerk limit cannot be clamped; use on_violation='reject'")

    def check(self, width: int) -> None:
        """Raises LimitsError unless every limit covers exactly `width` joints."""
        for name, shape in (("position", (width, 2)), ("step", (width,)), ("jerk", (width,))):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise LimitsError(f"action limit '{name}' has shape {value.shape}; this robot needs {shape}")

    def violations(self, actions: np.ndarray) -> tuple[Violation, ...]:
        """Every value of [T, dim] beyond a limit, in chunk order; empty for a chunk within the limits."""
        found = [
            Violation(kind, int(row) + offset, int(joint), float(values[row, joint]), float(bounds[row, joint]))
            for kind, values, bounds, beyond, offset in self._exceeded(actions)
            for row, joint in np.argwhere(beyond)
        ]
        return tuple(sorted(found, key=lambda violation: violation[1:3]))

    def apply(self, actions: np.ndarray) -> np.ndarray:
        """The chunk itself when it is within the limits; else a clamped copy, or ActionLimitError."""
        if not self._exceeded(actions):
            return actions
        if self.on_violation == "clamp":
            return self._clamped(actions)
        found = self.violations(actions)
        first = found[0]
        raise ActionLimitError(
            f"{len(found)} action values exceed the limits; first: {first.kind} of joint {first.joint} at step "
            f"{first.row} is {first.value:g}, the bound is {first.bound:g}. Do not execute this chunk"
        )

    def _exceeded(self, actions: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray, int]]:
        """(kind, values, bounds, which are beyond, rows before the first value) of each limit that is exceeded."""
        checks = []
        if self.position is not None:
            checks.append(("position", actions, self.position[:, 0], self.position[:, 1], 0))
        if self.step is not None:
            checks.append(("step", actions[1:] - actions[:-1], -self.step, self.step, 1))
        if self.jerk is not None:
            checks.append(("jerk", np.diff(actions, 3, axis=0), -self.jerk, self.jerk, 3))
        exceeded = []
        for kind, values, low, high, offset in checks:
            above = values > high
            beyond = above | (values < low)
            if beyond.any():
                exceeded.append((kind, values, np.where(above, high, low), beyond, offset))
        return exceeded

    def _clamped(self, actions: np.ndarray) -> np.ndarray:
        out = actions.copy()
        if self.position is not None:
            np.clip(out, self.position[:, 0], self.position[:, 1], out=out)
        if self.step is not None:
            bound = np.empty_like(out[0])
            for before, row in pairwise(out):
                np.maximum(row, np.subtract(before, self.step, out=bound), out=row)
                np.minimum(row, np.add(before, self.step, out=bound), out=row)
        return out


def check_finite(actions: np.ndarray, what: str) -> None:
    """Raises NonFiniteError that names the first bad row and dimension of [T, dim]."""
    finite = np.isfinite(actions)
    if np.count_nonzero(finite) == finite.size:
        return
    row, column = np.argwhere(~finite)[0]
    raise NonFiniteError(
        f"{what} are not finite: {int((~finite).sum())} values, first {actions[row, column]} at step {row}, dimension "
        f"{column}; no action is returned. Check the observation and the weights, then run parity on this checkpoint"
    )
