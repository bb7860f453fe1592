"""The policy that ships, in simulation where something can render."""

import warnings
from pathlib import Path

import pytest

import innerloop
from innerloop.contract import InnerloopError
from innerloop.simulation import display, evaluate
from innerloop.simulation.evaluate import Setting

SHIPPED = Path(__file__).parents[3] / "examples/checkpoints/metaworld-pi05"


def test_the_shipped_policy_closes_the_drawer_and_finds_the_ball() -> None:
    """Two tasks that it solves in 20 and 18 of 20 episodes: the second needs its cameras."""
    try:
        display.prepare()
    except InnerloopError as error:
        pytest.skip(str(error))
    asked = Setting(tasks=("drawer-close-v3", "reach-v3"), seeds=3, execute=16)
    policy = innerloop.load(SHIPPED, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Meta-World, about itself
        found = evaluate.outcomes(policy.infer, asked)
    policy.close()
    assert [outcome.success for outcome in found].count(True) >= 5
