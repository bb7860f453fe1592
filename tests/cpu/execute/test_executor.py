"""Chunks on the robot: where they join, when they are due, never across episodes."""

from itertools import pairwise

import numpy as np
import pytest

from innerloop.execute import MODES, Executor
from innerloop.execute.executor import seam


def ramp(start: float, horizon: int = 50) -> np.ndarray:
    """A plan that moves by one a step from `start`."""
    return (start + np.arange(horizon, dtype=np.float32))[:, None]


def test_a_first_chunk_starts_at_its_first_action_however_slow_the_call_was():
    executor = Executor(rate_hz=30)
    ticket = executor.ticket()
    for _ in range(21):  # 0.7 s at 30 Hz with nothing to do: the arm stands still
        assert executor.next() is None
    assert executor.answer(ramp(0), ticket)
    assert (executor.next()[0], executor.starved) == (0.0, 21)


def test_a_chunk_is_entered_at_the_step_that_was_really_reached():
    executor = Executor(rate_hz=30, blend=0)
    executor.answer(ramp(0), executor.ticket())
    for _ in range(10):
        executor.next()
    ticket = executor.ticket()
    for _ in range(6):
        executor.next()
    executor.answer(ramp(100), ticket)  # made for step 10, arrives at step 16
    assert executor.next()[0] == 106.0


def test_the_delay_forgets_a_spike():
    executor = Executor(rate_hz=30)
    executor.delay.measure(0.7)
    assert executor.delay.steps == 21
    for _ in range(100):
        executor.delay.measure(0.3)
    assert executor.delay.steps == 9


def test_seams_are_soft():
    """Two plans 3 units apart, inside each of which a step is 1: no step across the seam exceeds 1.6."""
    executor, steps, ticket = Executor(rate_hz=25, blend=8), [], None
    executor.answer(ramp(0), executor.ticket())
    for tick in range(30):
        if tick == 10:
            ticket = executor.ticket()
        if tick == 16:
            executor.answer(ramp(13), ticket)
        steps.append(executor.next()[0])
    assert np.diff(steps).max() <= 1.6
    assert steps[-1] == 13 + 19  # on the new plan in the end


def test_a_consistent_ramp_has_no_seam_at_all():
    executor, steps = Executor(rate_hz=25), []
    executor.answer(ramp(0), executor.ticket())
    for tick in range(40):
        if tick == 12:
            ticket = executor.ticket()
        if tick == 18:
            executor.answer(ramp(12), ticket)
        steps.append(executor.next()[0])
    np.testing.assert_array_equal(steps, np.arange(40))


def test_nothing_of_an_old_episode_is_played():
    executor = Executor(rate_hz=30)
    executor.answer(ramp(0), executor.ticket())
    late = executor.ticket()
    executor.reset()
    assert len(executor) == 0
    assert not executor.answer(ramp(500), late)
    assert executor.next() is None


@pytest.mark.parametrize("mode", MODES)
def test_a_late_chunk_of_the_last_episode_is_refused_in_every_mode(mode: str) -> None:
    executor = Executor(30, mode)
    late = executor.ticket()
    executor.reset()
    assert not executor.answer(ramp(500), late)
    assert executor.next() is None


def test_synchronous_executes_so_many_and_then_waits() -> None:
    executor, played = Executor(30, "synchronous", execute=8), []
    for turn in range(3):
        assert executor.due()
        executor.answer(ramp(100 * turn), executor.ticket(), 0.2)
        assert not executor.due()
        played += [executor.next()[0] for _ in range(8)]
        assert executor.next() is None
    assert played == [*range(8), *range(100, 108), *range(200, 208)]


def test_an_observation_is_due_every_so_many_steps_or_before_the_chunk_ends() -> None:
    executor = Executor(10, "asynchronous", execute=12)
    executor.answer(ramp(0, 20), executor.ticket(), 9.0)  # the first call is not counted
    assert not executor.delay.known
    executor.answer(ramp(0, 20), executor.ticket(), 0.45)
    assert executor.delay.steps == 5
    due = []
    for step in range(20):
        if executor.due():
            due.append(step)
        executor.next()
    assert due[0] == 12
    executor = Executor(10)
    executor.delay.measure(0.45)
    executor.answer(ramp(0, 20), executor.ticket())
    due = [step for step in range(20) if executor.due() or executor.next() is None]
    assert due[0] == 14  # 5 steps of delay, one to spare


def test_an_ensemble_is_the_mean_of_all_that_foresaw_a_step() -> None:
    executor = Executor(10, "ensemble", execute=1)
    for start in (0.0, 10.0, 20.0):
        assert executor.due()
        executor.answer(np.full((4, 1), start), executor.ticket())
        last = executor.next()
    weights = np.exp(-0.01 * np.arange(3))
    assert last[0] == pytest.approx((0 * weights[0] + 10 * weights[1] + 20 * weights[2]) / weights.sum())
    [executor.next() for _ in range(2)]  # the first two chunks have ended
    assert executor.next()[0] == 20.0
    assert executor.next() is None


@pytest.mark.parametrize(("mode", "schedule"), [("realtime", "LINEAR"), ("prefix", "PREFIX")])
def test_the_policy_is_told_what_is_left_and_how_much_of_it_will_pass(mode: str, schedule: str) -> None:
    executor = Executor(10, mode, execute=6)
    assert executor.ticket().continues is None
    executor.delay.measure(0.3)
    executor.answer(ramp(0, 16), executor.ticket())
    [executor.next() for _ in range(6)]
    ticket = executor.ticket()
    np.testing.assert_array_equal(ticket.continues, ramp(6, 10))
    assert (ticket.delay, ticket.schedule) == (3, schedule)
    [executor.next() for _ in range(3)]
    executor.answer(ramp(6, 16), ticket)
    assert executor.next()[0] == 9.0


def test_the_largest_step_at_a_seam_is_put_beside_the_largest_inside() -> None:
    actions = np.array([[0.0], [1.0], [2.0], [5.0], [6.0]])
    assert seam(actions, [3]) == 3.0
    assert seam(actions, []) is None
    smooth = Executor(25, blend=8)
    smooth.answer(ramp(0), smooth.ticket())
    first = [smooth.next() for _ in range(10)]
    ticket = smooth.ticket()
    first += [smooth.next() for _ in range(6)]
    smooth.answer(ramp(13), ticket)
    first += [smooth.next() for _ in range(10)]
    assert seam(np.array(first), smooth.joins, blend=8) == pytest.approx(
        max(b - a for a, b in pairwise(np.ravel(first))), 1e-4
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "no execution mode 'fast'.*realtime"),
        ({"execute": 0}, "execute is 0"),
        ({"rate_hz": 0}, "rate_hz is 0"),
        ({"rate_hz": float("nan")}, "rate_hz is nan"),
        ({"blend": -1}, "blend -1"),
    ],
)
def test_what_cannot_be_executed_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Executor(**{"rate_hz": 30, **options})
