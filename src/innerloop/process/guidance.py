"""What each row of a new chunk takes from the chunk it continues: a pull (arXiv:2506.07339), or itself (2512.05964)."""

import operator
from collections.abc import Mapping, Sequence

import numpy as np

from innerloop.contract import ObservationError, Previous

SCHEDULES = ("LINEAR", "EXP", "ONES", "ZEROS", "PREFIX")


def weights(schedule: str, chunk: int, delay: int, horizon: int) -> np.ndarray:
    """float32 [chunk]: 1 before `delay`, falling until `horizon`, then 0 (LeRobot 0.6.1 policies/rtc/modeling_rtc.py).

    PREFIX pulls nothing; see `given`.
    """
    if schedule not in SCHEDULES:
        raise ObservationError(f"there is no schedule {schedule!r}; choose of {', '.join(SCHEDULES)}")
    result = np.zeros(chunk, np.float32)
    if schedule == "PREFIX":
        return result
    start, end = min(delay, horizon), min(horizon, chunk)
    result[: start if schedule == "ZEROS" else end] = 1.0
    falling = end - start
    if schedule in ("LINEAR", "EXP") and falling > 0:
        line = 1.0 - np.arange(1, falling + 1) / (falling + 1)
        result[start:end] = line if schedule == "LINEAR" else line * np.expm1(line) / np.expm1(1.0)
    return result


def given(previous: Previous, horizon: int, trained: int | None) -> np.ndarray:
    """int32 [1]: how many rows of the new chunk are given, and so at the clean end of the solver's time throughout.

    trained: the longest such prefix of the policy's training, where its checkpoint states one. Raises ObservationError.
    """
    if previous.schedule != "PREFIX":
        return np.zeros(1, np.int32)
    if trained is not None and min(previous.delay, horizon) > trained:
        raise ObservationError(
            f"schedule PREFIX with a delay of {previous.delay} steps: this policy was trained to be given at most "
            f"{trained} (rtc_training_max_delay in its config.json). Use another schedule, such as LINEAR"
            + (", or lower the control rate" if trained else "")
        )
    return np.array([min(previous.delay, horizon)], np.int32)


def holds(chunk: int, delay: int, horizon: int, rate: float) -> np.ndarray:
    """float32 [chunk]: how much of its velocity each row loses in GR00T N1.7's own continuation of a chunk.

    1 before `delay`, falling exponentially until `horizon`, then 0, where a row starts from noise as ever
    (Isaac-GR00T gr00t_n1d7 get_action_with_features, LeRobot 0.6.1 groot_n1_7.py).
    """
    held = np.zeros(chunk, np.float32)
    end = min(horizon, chunk)
    start = min(delay, end)
    held[:start] = 1.0
    rise = -np.expm1(-rate * np.linspace(0.0, 1.0, end - start + 2))
    held[start:end] = 1.0 - (rise / rise[-1])[1:-1]
    return held


def check(previous: Previous, width: int, chunk: int) -> np.ndarray:
    """The actions to continue as float32 [n, width]. Raises ObservationError."""
    if isinstance(previous, np.ndarray | Mapping | Sequence):
        raise ObservationError(f"previous is {type(previous).__name__}; pass innerloop.Previous(actions, delay)")
    actions = np.asarray(previous.actions, np.float32)
    if actions.ndim != 2 or actions.shape[1] != width or len(actions) > chunk:
        raise ObservationError(
            f"previous.actions has shape {list(actions.shape)}; this policy's are [0 to {chunk}, {width}]: pass the rows "
            "of the last chunk that are not executed yet"
        )
    if not np.isfinite(actions).all():
        raise ObservationError("previous.actions is not finite; pass what was really commanded")
    for name, steps in (("delay", previous.delay), ("horizon", previous.horizon or 0)):
        try:
            operator.index(steps)
        except TypeError as error:
            raise ObservationError(f"previous.{name} is {steps!r}; it counts control steps: round it up") from error
    if not 0 <= previous.delay < chunk:
        raise ObservationError(
            f"previous.delay is {previous.delay} steps, but a chunk has {chunk}: no action of it would be in time. "
            "Execute synchronously, or lower the control rate"
        )
    if previous.horizon is not None and previous.horizon < 0:
        raise ObservationError(f"previous.horizon is {previous.horizon}; it counts rows of previous.actions")
    return actions
