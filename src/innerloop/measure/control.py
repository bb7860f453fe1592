"""Control-time roofline: is the policy the limit, or the robot?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from innerloop.contract import InnerloopError
from innerloop.measure.record import ControlRecord, ControlRow

DELAYS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class ControlLoop:
    """A robot that executes `horizon` actions of every chunk of `chunk`.

    control_hz: actions a second that the robot wants. environment_ms: least time of one environment step (simulator,
    controller); a step takes the longer of the two. latency_ms: one whole call. delay_ms: network, both ways.
    """

    chunk: int
    horizon: int
    control_hz: float
    environment_ms: float
    delay_ms: float
    latency_ms: float

    def __post_init__(self) -> None:
        if not 1 <= self.horizon <= self.chunk:
            raise InnerloopError(
                f"executed horizon {self.horizon} is outside 1..{self.chunk}, the chunk; choose one in it"
            )
        if self.control_hz <= 0:
            raise InnerloopError(f"control rate {self.control_hz} Hz is not positive; give the robot's action rate")
        if min(self.environment_ms, self.delay_ms) < 0:
            raise InnerloopError(
                f"an environment step of {self.environment_ms} ms or a network delay of {self.delay_ms} ms is negative"
            )

    @property
    def step_ms(self) -> float:
        """Time of one executed action."""
        return max(1e3 / self.control_hz, self.environment_ms)

    @property
    def execution_ms(self) -> float:
        """Time in which the robot consumes one chunk's executed actions."""
        return self.horizon * self.step_ms

    @property
    def answer_ms(self) -> float:
        """From observation to actions at the robot."""
        return self.latency_ms + self.delay_ms

    @property
    def bound(self) -> str:
        """inference when overlapped execution stays below the robot's own rate, else environment."""
        return "inference" if self.overlapped_hz * self.step_ms < 1e3 * (1 - 1e-9) else "environment"

    @property
    def flip_ms(self) -> float:
        """The call latency above which the loop is inference-bound, after network delay; may be negative.

        A chunk must come while its predecessor executes, and half of it must not be past by then.
        """
        return min(self.horizon, self.chunk // 2) * self.step_ms - self.delay_ms

    @property
    def synchronous_hz(self) -> float:
        """Actions a second when the robot waits for each chunk."""
        return 1e3 * self.horizon / (self.execution_ms + self.answer_ms)

    @property
    def overlapped_hz(self) -> float:
        """Actions a second when the next chunk is computed while this one executes.

        Actions whose time passed while the chunk was on its way are skipped. Where the rest of the chunk is too short
        to be worth it, waiting is faster, and the loop waits.
        """
        usable = min(self.horizon, self.chunk - self.skipped)
        if usable < 1:
            return self.synchronous_hz
        return max(1e3 * usable / max(usable * self.step_ms, self.answer_ms), self.synchronous_hz)

    @property
    def skipped(self) -> int:
        """Actions at a chunk's start that are already past when it arrives in overlapped execution."""
        return math.ceil(self.answer_ms / self.step_ms - 1e-9)

    @property
    def oldest_observation_ms(self) -> float:
        """Age of the observation behind the last executed action of a chunk."""
        return self.answer_ms + self.execution_ms


def sweep(loop: ControlLoop, delays_ms: Sequence[float], horizons: Sequence[int]) -> list[ControlLoop]:
    """The same loop at every delay and executed horizon."""
    return [replace(loop, delay_ms=delay, horizon=horizon) for delay in delays_ms for horizon in horizons]


def horizons(chunk: int) -> list[int]:
    """Executed horizons worth a row: powers of two up to the chunk, and the chunk."""
    powers = [2**power for power in range(chunk.bit_length()) if 2**power < chunk]
    return [*powers, chunk]


def control_record(loop: ControlLoop, origin: Mapping[str, Any]) -> ControlRecord:
    """The loop's figures, and the sweep over network delays and executed horizons. `origin`: fields of every record."""
    swept = sweep(loop, DELAYS_MS, horizons(loop.chunk))
    rows = [ControlRow(**_figures(one, ControlRow)) for one in swept]
    return ControlRecord(**origin, **_figures(loop, ControlRecord), rows=rows)


def recorded_loop(record: ControlRecord) -> ControlLoop:
    """The loop that a record is of."""
    return ControlLoop(**_figures(record, ControlLoop))


def _figures(source: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of `kind` that `source` has an answer to."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if hasattr(source, field.name)}
