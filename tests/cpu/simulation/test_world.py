"""The simulated worlds themselves; skipped where the `sim` extra or a GL library is missing."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from innerloop.contract import InnerloopError
from innerloop.simulation import display
from innerloop.simulation.world import CAMERAS, SIZE, TASKS, World
from recipes.demo_policy import sight


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    if find_spec("metaworld") is None or find_spec("mujoco") is None:
        pytest.skip("needs innerloop[sim]")
    if display._usable() is None:
        pytest.skip("nothing renders here")
    made = World("reach-v3")
    yield made
    made.close()


def test_an_observation_is_what_the_policy_takes(world: World) -> None:
    world.reset(0)
    seen = world.observe()
    assert {name: (image.shape, image.dtype) for name, image in seen["images"].items()} == dict.fromkeys(
        CAMERAS, ((SIZE, SIZE, 3), np.uint8)
    )
    assert all(image.std() > 20 for image in seen["images"].values())  # something is drawn
    assert (seen["state"].shape, seen["state"].dtype) == ((4,), np.float32)
    assert seen["prompt"] == TASKS["reach-v3"]


def test_a_seed_is_an_episode(world: World) -> None:
    def first(seed: int) -> list[np.ndarray]:
        world.reset(seed)
        found = [world.observe()["images"]["front"], world.values]
        for _ in range(5):
            world.step(np.array([1.0, 0.0, 0.5, -1.0]))
        return [*found, world.state]

    once, other, again = first(3), first(4), first(3)
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(once[0], other[0])  # the goal is elsewhere


def test_holding_still_moves_nothing_and_keeps_the_grip(world: World) -> None:
    world.reset(0)
    for _ in range(10):
        world.step(np.array([1.0, 0.0, 0.0, 1.0]))
    moving = world.state
    still = world.hold(np.array([1.0, 0.0, 0.0, 1.0]))
    assert still.tolist() == [0.0, 0.0, 0.0, 1.0]
    for _ in range(20):
        world.step(still)
    rest = world.state
    assert np.abs(rest - moving)[:3].max() < 0.05  # metres, to come to rest from full speed
    for _ in range(20):
        world.step(still)
    assert np.abs(world.state - rest).max() < 1e-3


def test_a_task_that_is_not_there_is_named() -> None:
    with pytest.raises(InnerloopError, match="no task 'fly-v3'; choose of reach-v3"):
        World("fly-v3")


def test_the_ball_is_drawn_where_the_goal_is_before_anything_moves(world: World) -> None:
    for seed in (0, 1, 2):
        world.reset(seed)
        image = world.observe()["images"]["front"].astype(int)
        red = (image[..., 0] > 200) & (image[..., 1] < 60) & (image[..., 2] < 60)
        rows, columns = np.nonzero(red & (np.arange(SIZE)[:, None] > SIZE // 2))  # below the gripper's red tips
        expected = sight.positions(world)[0, -1]
        assert np.abs(expected - (columns.mean(), rows.mean())).max() < 2  # pixels
