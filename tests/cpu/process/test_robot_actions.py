"""Actions: relative chunks are anchored once, limits flag or clamp, what is not finite never leaves."""

import time

import numpy as np
import pytest

from innerloop.contract import CheckpointError, NonFiniteError
from innerloop.process import ActionLimitError, ActionLimits, RelativeActions
from innerloop.process.action import check_finite

RNG = np.random.default_rng(0)


def test_a_relative_chunk_is_anchored_at_its_own_observation() -> None:
    chunk = np.array([[1.0], [1.0], [1.0]]).cumsum(0)
    np.testing.assert_array_equal(RelativeActions((True,)).to_absolute(chunk, np.array([10.0])), [[11], [12], [13]])


def test_relative_and_absolute_undo_each_other_and_leave_their_inputs_alone() -> None:
    relative = RelativeActions((True, False, True))
    actions, state = RNG.standard_normal((10, 5)), RNG.standard_normal(8)
    kept = actions.copy(), state.copy()
    there = relative.to_relative(actions, state)
    np.testing.assert_array_equal(there[:, [1, 3, 4]], actions[:, [1, 3, 4]])
    np.testing.assert_array_equal(there[:, 0], actions[:, 0] - state[0])
    np.testing.assert_allclose(relative.to_absolute(there, state), actions, atol=1e-12)
    np.testing.assert_array_equal(actions, kept[0])
    np.testing.assert_array_equal(state, kept[1])


def test_excluded_joints_are_found_in_names() -> None:
    names = ["shoulder.pos", "Left_Gripper.pos", "wrist.pos"]
    assert RelativeActions.excluding(["gripper"], names, 4).mask == (True, False, True, True)
    assert RelativeActions.excluding(["gripper"], None, 3).mask == (True, True, True)
    assert RelativeActions.excluding([], names, 3).mask == (True, True, True)


def test_a_mask_wider_than_state_or_action_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cover 7 dimensions, but the state has 6 and the action 7"):
        RelativeActions((True,) * 7).check(6, 7)


def limits(**more: object) -> ActionLimits:
    position = np.stack([np.full(32, -2.0), np.full(32, 2.0)], 1)
    return ActionLimits(position=position, step=np.full(32, 0.5), **more)  # type: ignore[arg-type]


def smooth(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.uniform(-0.2, 0.2, (50, 32)).cumsum(0), -1.9, 1.9).astype(np.float32)


def test_a_value_beyond_a_limit_is_named() -> None:
    chunk = smooth(0)
    chunk[7, 3] = 6.0
    found = limits(jerk=np.full(32, 100.0)).violations(chunk)
    assert [(v.kind, v.row, v.joint) for v in found] == [("position", 7, 3), ("step", 7, 3), ("step", 8, 3)]
    assert found[0].value == 6.0
    assert found[0].bound == 2.0
    with pytest.raises(
        ActionLimitError, match=r"3 action values .* first: position of joint 3 at step 7 is 6, the bound is 2"
    ):
        limits().apply(chunk)


def test_jerk_is_the_third_difference() -> None:
    chunk = np.zeros((6, 1), np.float32)
    chunk[3] = 1.0
    found = ActionLimits(jerk=np.array([2.0])).violations(chunk)
    assert [(v.row, v.value) for v in found] == [(4, -3.0), (5, 3.0)]


def test_a_thousand_clean_chunks_raise_no_alarm_and_keep_their_bits() -> None:
    checked = limits(jerk=np.full(32, 2.0))
    for seed in range(1000):
        chunk = smooth(seed)
        assert checked.apply(chunk) is chunk


def test_clamping_moves_values_inside_and_nothing_else() -> None:
    chunk = smooth(1)
    chunk[10:12, 5] = 9.0
    kept = chunk.copy()
    out = limits(on_violation="clamp").apply(chunk)
    np.testing.assert_array_equal(chunk, kept)
    assert np.abs(np.diff(out, axis=0)).max() <= 0.5 + 1e-6
    assert np.abs(out).max() <= 2
    np.testing.assert_array_equal(np.delete(out, 5, 1), np.delete(chunk, 5, 1))
    np.testing.assert_array_equal(out[:10], chunk[:10])


def test_checking_costs_less_than_a_tenth_of_a_millisecond() -> None:
    checked, chunk, best = limits(jerk=np.full(32, 2.0)), smooth(2), 1.0
    for _ in range(200):
        start = time.perf_counter()
        checked.apply(chunk)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-4


def test_limits_must_fit_the_robot_and_jerk_cannot_be_clamped() -> None:
    limits().check(32)
    with pytest.raises(ValueError, match=r"'position' has shape \(32, 2\); this robot needs \(7, 2\)"):
        limits().check(7)
    with pytest.raises(ValueError, match="jerk limit cannot be clamped"):
        ActionLimits(jerk=np.ones(3), on_violation="clamp")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_value_that_is_not_finite_is_named(bad: float) -> None:
    chunk = np.zeros((10, 7), np.float32)
    check_finite(chunk, "actions")
    chunk[4, 6] = chunk[5, 0] = bad
    with pytest.raises(NonFiniteError, match=r"actions are not finite: 2 values, first .* at step 4, dimension 6"):
        check_finite(chunk, "actions")
