"""Robot state and the numbers around it: normalisation with its inverse, discretisation, padding."""

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from innerloop.contract import CheckpointError, ObservationError

_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_QUANTILE_PAIR = re.compile(r"Q(\d\d)_Q(\d\d)")  # any other pair of quantiles, such as Q02_Q98
# pi05: openpi models/tokenizer.py, LeRobot processor_pi05.py
_BIN_EDGES: list[float] = np.linspace(-1, 1, 256 + 1)[:-1].tolist()


@dataclass(frozen=True)
class Convention:
    """How a code base divides by a spread. `always`: eps is added every time; else a zero range becomes eps."""

    name: str
    eps: float
    always: bool
    dtype: type


# LeRobot 0.6.1 processor/normalize_processor.py: mean/std divides by std + eps and multiplies by std.
LEROBOT = Convention("lerobot", 1e-8, False, np.float32)
# openpi transforms.py Normalize and Unnormalize: + 1e-6 in both directions, in the float64 of norm_stats.json.
OPENPI = Convention("openpi", 1e-6, True, np.float64)


def statistic_names(mode: str) -> tuple[str, ...]:
    """The statistics a mode needs; () for IDENTITY. Raises CheckpointError for a mode that cannot be inverted."""
    if mode == "IDENTITY":
        return ()
    if mode == "MEAN_STD":
        return ("mean", "std")
    if mode in _RANGES:
        return _RANGES[mode]
    pair = _QUANTILE_PAIR.fullmatch(mode)
    if pair and pair[1] < pair[2]:
        return (f"q{pair[1]}", f"q{pair[2]}")
    raise CheckpointError(
        f"normalisation mode '{mode}' is not known to be invertible; known: IDENTITY, MEAN_STD, "
        f"{', '.join(_RANGES)}, Qaa_Qbb. A mode whose scale comes from each chunk itself cannot be undone"
    )


@dataclass(frozen=True)
class Normalizer:
    """normalised = (x - offset) / divisor, for ranges that - 1. Statistics [dim] or [horizon, dim].

    A range's divisor is half its span: halving is exact, so the bits are those of 2 * (x - offset) / span - 1.
    """

    mode: str
    offset: np.ndarray
    divisor: np.ndarray
    factor: np.ndarray

    @classmethod
    def from_statistics(
        cls, feature: str, mode: str, statistics: Mapping[str, Any], convention: Convention = LEROBOT
    ) -> "Normalizer":
        """Raises CheckpointError where `statistics` (name -> array) lacks what `mode` needs or cannot be inverted."""
        names = statistic_names(mode)
        if not names:
            one: np.ndarray = np.ones((), convention.dtype)
            return cls(mode, np.zeros((), convention.dtype), one, one)
        absent = [name for name in names if name not in statistics]
        if absent:
            raise CheckpointError(
                f"'{feature}' is normalised by {mode}, which needs the statistics {', '.join(names)}; the checkpoint "
                f"has {', '.join(sorted(statistics)) or 'none'}. Store {', '.join(absent)}, or correct the mode"
            )
        low, high = (_statistic(feature, name, statistics[name], convention.dtype) for name in names)
        if low.shape != high.shape:
            raise CheckpointError(f"'{feature}': {names[0]} has shape {low.shape} and {names[1]} {high.shape}")
        if mode == "MEAN_STD":
            return cls._mean_std(feature, low, high, convention)
        if np.any(high < low):
            raise CheckpointError(f"'{feature}': {names[1]} is below {names[0]} in dimension {_first(high < low)}")
        span = high - low
        eps = convention.dtype(convention.eps)
        span = span + eps if convention.always else np.where(span == 0, eps, span)
        half = span / convention.dtype(2)
        return cls(mode, low, half, half)

    @classmethod
    def _mean_std(cls, feature: str, mean: np.ndarray, std: np.ndarray, convention: Convention) -> "Normalizer":
        if np.any(std < 0):
            raise CheckpointError(f"'{feature}': the standard deviation is negative in dimension {_first(std < 0)}")
        spread = std + convention.dtype(convention.eps)
        return cls("MEAN_STD", mean, spread, spread if convention.always else std)

    @property
    def width(self) -> int | None:
        """Dimensions the statistics cover; None for IDENTITY."""
        return None if self.mode == "IDENTITY" else int(self.offset.shape[-1])

    @property
    def horizon(self) -> int | None:
        """Rows of per-step statistics; None when one row serves every step."""
        return int(self.offset.shape[0]) if self.offset.ndim == 2 else None

    def cut(self, width: int) -> "Normalizer":
        """The same over the first `width` dimensions."""
        if self.mode == "IDENTITY":
            return self
        return Normalizer(self.mode, self.offset[..., :width], self.divisor[..., :width], self.factor[..., :width])

    def rows(self, count: int) -> "Normalizer":
        """The same for the first `count` rows of a chunk."""
        if self.horizon is None:
            return self
        return Normalizer(self.mode, self.offset[:count], self.divisor[:count], self.factor[:count])

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Robot units -> normalised, in the statistics' dtype; a new array."""
        if self.mode == "IDENTITY":
            return np.array(values, dtype=self.offset.dtype)
        values = np.asarray(values, dtype=self.offset.dtype)
        centred: np.ndarray = values - self.offset
        scaled: np.ndarray = centred / self.divisor if self.mode == "MEAN_STD" else centred / self.divisor - 1
        return scaled

    def invert(self, values: np.ndarray) -> np.ndarray:
        """Normalised -> robot units, in the statistics' dtype; a new array."""
        if self.mode == "IDENTITY":
            return np.array(values, dtype=self.offset.dtype)
        values = np.asarray(values, dtype=self.offset.dtype)
        unit: np.ndarray = values if self.mode == "MEAN_STD" else values + 1
        scaled: np.ndarray = unit * self.factor + self.offset
        return scaled


def to_state(state: Any, width: int, dtype: type, *, exact: bool = True) -> np.ndarray:
    """The caller's state as a fresh [n] array; n == width, or n <= width when not `exact`. Raises ObservationError."""
    try:
        values = np.asarray(state)
    except ValueError as error:
        raise ObservationError(f"state is not an array of numbers ({error}); pass a flat array of floats") from error
    if values.dtype.kind not in "fiu":
        raise ObservationError(f"state holds {values.dtype}, not numbers; pass a flat array of floats")
    if values.ndim != 1:
        raise ObservationError(f"state has shape {values.shape}; expected [{width}] without a batch dimension")
    fits = values.size == width if exact else 0 < values.size <= width
    if not fits:
        bound = f"{width}" if exact else f"1 to {width}"
        raise ObservationError(
            f"state has {values.size} values, the checkpoint takes {bound}; send what it was trained with, in order"
        )
    if values.dtype == dtype:
        values = values.copy()
    else:
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
    if not all(map(math.isfinite, values.tolist())):  # of a few numbers sooner known than by two array operations
        bad = _first(~np.isfinite(values))
        raise ObservationError(f"state is not finite (NaN or infinity) in dimension {bad}; check the sensor")
    return values


def discretize(state: np.ndarray) -> list[int]:
    """Normalised state [n] -> bins, 0..255 inside [-1, 1] and -1 below it, as openpi and LeRobot 0.6.1 write them."""
    return [bisect_right(_BIN_EDGES, value) - 1 for value in state.tolist()]


def pad(values: np.ndarray, width: int) -> np.ndarray:
    """float32 [width]: the values, then zeros."""
    out = np.zeros(width, np.float32)
    out[: values.shape[-1]] = values
    return out


def _statistic(feature: str, name: str, value: Any, dtype: type) -> np.ndarray:
    array: np.ndarray = np.asarray(value, dtype=dtype)
    if array.ndim not in (1, 2) or array.size == 0:
        raise CheckpointError(f"'{feature}': statistic {name} has shape {array.shape}, not [dim] or [horizon, dim]")
    if not np.isfinite(array).all():
        bad = _first(~np.isfinite(array))
        raise CheckpointError(f"'{feature}': statistic {name} is not finite in dimension {bad}; compute it again")
    return array


def _first(mask: np.ndarray) -> int:
    return int(np.argwhere(mask)[0][-1])
