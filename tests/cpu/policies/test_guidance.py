"""Real-time chunking as an input of the captured action stage."""

from typing import Any

import numpy as np
import pytest
from loaded_policies import observe

from innerloop import Previous
from innerloop.blocks import flow
from innerloop.contract import ObservationError
from innerloop.engine import LoadedPolicy
from innerloop.process.guidance import weights


def test_no_previous_chunk_is_the_plain_call_bit_for_bit(policy: LoadedPolicy) -> None:
    observation = observe(policy, 1)
    plain = policy.infer(observation, seed=3)
    empty = Previous(np.zeros((0, policy.processor.widths.action)))
    ignored = Previous(plain.actions, delay=0, schedule="ZEROS")
    for previous in (empty, ignored):
        assert policy.infer(observation, seed=3, previous=previous).actions.tobytes() == plain.actions.tobytes()


def test_a_guided_decision_leaves_nothing_behind(policy: LoadedPolicy) -> None:
    observation = observe(policy, 2)
    plain = policy.infer(observation, seed=3).actions
    guided = policy.infer(observation, seed=3, previous=Previous(plain + 0.5, delay=2)).actions
    assert np.abs(guided - plain).max() > 0.01
    assert policy.infer(observation, seed=3).actions.tobytes() == plain.tobytes()


def test_every_delay_runs_the_same_captured_stages(policy: LoadedPolicy) -> None:
    observation, captured = observe(policy, 4), policy.runtime.captures
    old = policy.infer(observation, seed=1).actions
    for delay in range(len(old)):
        receipt = policy.infer(observation, seed=2, previous=Previous(old, delay)).receipt
        assert receipt is not None
        assert receipt.stages == ("action",)
    assert policy.runtime.captures == captured


def test_the_executed_part_follows_the_previous_chunk(policy: LoadedPolicy) -> None:
    observation = observe(policy, 5)
    old = policy.infer(observation, seed=1).actions
    free = policy.infer(observation, seed=2).actions
    held = policy.infer(observation, seed=2, previous=Previous(old, delay=5)).actions
    assert np.abs(held[:5] - old[:5]).max() < 0.25 * np.abs(free[:5] - old[:5]).max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"actions": np.zeros((2, 3))}, r"shape \[2, 3\]"),
        ({"actions": np.full((2, 7), np.nan)}, "not finite"),
        ({"delay": 10}, "a chunk has 10.*synchronously"),
        ({"delay": -1}, "delay is -1"),
        ({"delay": 2.5}, r"delay is 2\.5; it counts control steps"),
        ({"horizon": 3.0}, r"horizon is 3\.0; it counts control steps"),
        ({"horizon": -2}, "horizon is -2"),
        ({"schedule": "SQUARE"}, "no schedule 'SQUARE'.*LINEAR.*PREFIX"),
        ({"schedule": "PREFIX", "delay": 10}, "a chunk has 10.*synchronously"),
    ],
)
def test_what_cannot_be_continued_is_named(policy: LoadedPolicy, change: dict[str, Any], words: str) -> None:
    width = policy.processor.widths.action
    given: dict[str, Any] = {"actions": np.zeros((4, width), np.float32), "delay": 1, **change}
    if given["actions"].shape[1] == 7:
        given["actions"] = np.resize(given["actions"], (2, width))
    with pytest.raises(ObservationError, match=words):
        policy.infer(observe(policy, 0), previous=Previous(**given))
    bare: Any = given["actions"]
    with pytest.raises(ObservationError, match="previous is ndarray; pass innerloop.Previous"):
        policy.infer(observe(policy, 0), previous=bare)


def test_weights_of_each_schedule() -> None:
    """Chunk 10, delay 2, horizon 6, as LeRobot's RTCProcessor gives them."""
    expected = {
        "LINEAR": [1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0],
        "EXP": [1, 1, 0.5706, 0.2871, 0.1145, 0.0258, 0, 0, 0, 0],
        "ONES": [1] * 6 + [0] * 4,
        "ZEROS": [1] * 2 + [0] * 8,
    }
    for schedule, row in expected.items():
        np.testing.assert_allclose(weights(schedule, 10, 2, 6), row, atol=1e-4)


def test_gains_of_ten_steps() -> None:
    wanted = [10, 9.1111, 4.25, 2.7619, 2.1667, 2.0, 2.1667, 2.7619, 4.25, 9.1111]
    np.testing.assert_allclose(flow.gains(10), wanted, atol=1e-4)
