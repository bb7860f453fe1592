"""Real-time chunking: our captured inputs against LeRobot's guidance of each solver step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from innerloop import Previous
from recipes.tiny.make import Recipe

SCHEDULES = ("LINEAR", "EXP", "ONES", "ZEROS")


def leftover(both: Any, rows: int, seed: int = 5) -> np.ndarray:
    """float32 [rows, action_dim], normalised."""
    width = both.policy.processor.widths.action
    return np.random.default_rng(seed).uniform(-1, 1, (rows, width)).astype(np.float32)


def in_robot_units(both: Any, normalized: np.ndarray, observation: dict) -> np.ndarray:
    """The same actions as a robot's queue holds them."""
    widths = both.policy.processor.widths
    padded = np.zeros((widths.chunk, widths.max_action), np.float32)
    padded[: len(normalized), : widths.action] = normalized
    context = both.policy.processor.prepare(observation).context
    return both.policy.processor.finish(padded, context)[: len(normalized)]


def both_ways(both: Any, rows: int, delay: int, horizon: int, schedule: str) -> tuple[np.ndarray, np.ndarray]:
    """Ours and theirs, normalised, [chunk, action_dim]."""
    observation, noise, left = both.observation(delay), both.noise(delay), leftover(both, rows)
    theirs = both.official.guided(observation, noise, left, delay=delay, horizon=horizon, schedule=schedule)
    previous = Previous(in_robot_units(both, left, observation), delay, horizon, schedule)
    ours = both.policy.infer(observation, noise=noise, previous=previous).normalized
    return ours[:, : theirs.shape[-1]], theirs


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize("delay", range(13))
def test_delays(sides: Callable[..., Any], family: str, delay: int) -> None:
    both = sides(Recipe(family, chunk=16))
    schedule = SCHEDULES[delay % 4]
    ours, theirs = both_ways(both, 16, delay, 14, schedule)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    observation, noise = both.observation(delay), both.noise(delay)
    plain = both.policy.infer(observation, noise=noise).normalized[:, : theirs.shape[-1]]
    moves = not (schedule == "ZEROS" and delay == 0)
    assert (np.abs(plain - ours).max() > 0.01) == moves


@pytest.mark.parametrize("rows", [0, 1, 4, 9])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shorter_previous_chunks(sides: Callable[..., Any], rows: int, schedule: str) -> None:
    ours, theirs = both_ways(sides(Recipe("pi05", chunk=16)), rows, 3, 10, schedule)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_relative_actions_continue_from_the_new_state(sides: Callable[..., Any]) -> None:
    both = sides(Recipe("pi05", relative=True))
    ours, theirs = both_ways(both, 8, 2, 8, "LINEAR")
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
