"""Every normalisation mode, and relative actions, in both directions as LeRobot does them."""

import pytest

from recipes.tiny.make import MODES, Recipe

SMALL = {"cameras": 1, "chunk": 10, "steps": 5, "capacity": 64, "image_size": 56}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_modes(sides, agree, family, mode):
    both = sides(Recipe(family, normalization=mode, seed=3, **SMALL))
    agree(both.compare(both.observation()))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_relative_actions_become_absolute(sides, agree, family):
    both = sides(Recipe(family, relative=True, seed=4, **SMALL))
    report = both.compare(both.observation())
    agree(report)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_robot_as_wide_as_the_model(sides, agree, family):
    both = sides(Recipe(family, state=32, actions=32, **{**SMALL, "capacity": 200}))
    agree(both.compare(both.observation()))
