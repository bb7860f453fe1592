"""Every stage agrees with LeRobot in fp32, over cameras, chunk lengths and solver steps, with a camera masked."""

import numpy as np
import pytest

from recipes.tiny.make import Recipe

SMALL = {"image_size": 56, "capacity": 48, "state": 6}


@pytest.mark.parametrize("steps", [1, 5, 10])
@pytest.mark.parametrize("chunk", [1, 10, 50])
@pytest.mark.parametrize("cameras", [1, 2, 3])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_every_stage_agrees(sides, agree, family, cameras, chunk, steps):
    both = sides(Recipe(family, cameras=cameras, chunk=chunk, steps=steps, seed=chunk + steps, **SMALL))
    agree(both.compare(both.observation(seed=steps), seed=chunk))
    if cameras > 1:
        masked = both.official.cameras[(chunk + steps) % cameras]
        agree(both.compare(both.observation(seed=chunk, absent=masked), seed=steps))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize("masked", ["base", "wrist", "side"])
def test_any_camera_may_be_masked(sides, agree, family, masked):
    both = sides(Recipe(family, cameras=3, **SMALL))
    agree(both.compare(both.observation(absent=masked)))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_empty_camera_slots(sides, agree, family):
    both = sides(Recipe(family, cameras=2, empty=1, **SMALL))
    agree(both.compare(both.observation()))
    agree(both.compare(both.observation(absent="base")))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_infer_gives_the_compared_actions(sides, family):
    both = sides(Recipe(family, cameras=2, **SMALL))
    observation, noise = both.observation(1), both.noise(1)
    trace = both.official.trace(observation, noise)
    for _ in range(2):  # the second decision refreshes only the solver
        chunk = both.policy.infer(observation, noise=noise)
        width = trace["normalized"].shape[1]
        np.testing.assert_allclose(chunk.normalized[:, :width], trace["normalized"], rtol=0, atol=1e-4)
        largest = np.abs(trace["actions"]).max()
        np.testing.assert_allclose(chunk.actions, trace["actions"], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_published_image_size(sides, agree, family):
    both = sides(Recipe(family, cameras=2, seed=7))
    for seed in range(4):  # four frame sizes a camera
        agree(both.compare(both.observation(seed)))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_state_beyond_its_statistics(sides, agree, family):
    both = sides(Recipe(family, cameras=1, capacity=64, image_size=56))
    agree(both.compare(both.observation(3, reach=9.0)))
