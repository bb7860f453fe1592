"""Chunks on the robot: spliced at the step really reached, over soft seams, never across episodes."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from serving_fakes import wait_until

from innerloop.client import ActionQueue, ChunkPlayer


def ramp(start, horizon=50):
    """A plan that moves by one a step from `start`."""
    return (start + np.arange(horizon, dtype=np.float32))[:, None]


def test_a_first_chunk_starts_at_its_first_action_however_slow_the_call_was():
    queue = ActionQueue(rate_hz=30)
    ticket = queue.ticket()
    for _ in range(21):  # 0.7 s at 30 Hz with nothing to do: the arm stands still
        assert queue.next() is None
    assert queue.splice(ramp(0), ticket)
    assert (queue.next()[0], queue.starved) == (0.0, 21)


def test_a_chunk_is_entered_at_the_step_that_was_really_reached():
    queue = ActionQueue(rate_hz=30, blend=0)
    queue.splice(ramp(0), queue.ticket())
    for _ in range(10):
        queue.next()
    ticket = queue.ticket()
    for _ in range(6):
        queue.next()
    queue.splice(ramp(100), ticket)  # made for step 10, arrives at step 16
    assert queue.next()[0] == 106.0


def test_the_delay_forgets_a_spike():
    queue = ActionQueue(rate_hz=30)
    queue.measure(0.7)
    assert queue.delay == 21
    for _ in range(100):
        queue.measure(0.3)
    assert queue.delay == 9


def test_seams_are_soft():
    """Two plans 3 units apart, inside each of which a step is 1: no step across the seam exceeds 1.6."""
    queue, steps, ticket = ActionQueue(rate_hz=25, blend=8), [], None
    queue.splice(ramp(0), queue.ticket())
    for tick in range(30):
        if tick == 10:
            ticket = queue.ticket()
        if tick == 16:
            queue.splice(ramp(13), ticket)
        steps.append(queue.next()[0])
    assert np.diff(steps).max() <= 1.6
    assert steps[-1] == 13 + 19  # on the new plan in the end


def test_a_consistent_ramp_has_no_seam_at_all():
    queue, steps = ActionQueue(rate_hz=25), []
    queue.splice(ramp(0), queue.ticket())
    for tick in range(40):
        if tick == 12:
            ticket = queue.ticket()
        if tick == 18:
            queue.splice(ramp(12), ticket)
        steps.append(queue.next()[0])
    np.testing.assert_array_equal(steps, np.arange(40))


def test_nothing_of_an_old_episode_is_played():
    queue = ActionQueue(rate_hz=30)
    queue.splice(ramp(0), queue.ticket())
    late = queue.ticket()
    queue.reset()
    assert len(queue) == 0
    assert not queue.splice(ramp(500), late)
    assert queue.next() is None


@pytest.fixture
def play():
    players = []

    def make(infer, **options):
        players.append(ChunkPlayer(infer, **options))
        return players[-1]

    yield make
    for player in players:
        player.close()


def test_the_robot_moves_on_while_the_next_chunk_is_made(play):
    def infer(seen):
        time.sleep(0.04)
        return SimpleNamespace(actions=ramp(seen["step"], 20))

    player, played = play(infer, rate_hz=100), []
    for _ in range(120):
        action = player.step({"step": player.queue.executed})
        if action is not None:
            played.append(action[0])
        time.sleep(0.01)
    assert player.queue.starved <= 8  # the first call, and no other
    np.testing.assert_array_equal(played, np.arange(len(played)))


def test_with_rtc_the_policy_is_told_what_it_continues(play):
    given = []

    def infer(seen, previous=None):
        given.append(previous)
        time.sleep(0.03)
        return SimpleNamespace(actions=ramp(seen["step"], 20))

    player = play(infer, rate_hz=100, blend=0, rtc=True)
    for _ in range(60):
        player.step({"step": player.queue.executed})
        time.sleep(0.01)
    assert given[0] is None
    later = given[-1]
    assert later.delay == min(player.queue.delay, len(later.actions) - 1) > 0
    np.testing.assert_array_equal(np.diff(later.actions[:, 0]), 1.0)


def test_a_late_chunk_of_the_last_episode_is_dropped_by_the_player(play):
    gate = threading.Event()

    def infer(seen):
        gate.wait(5)
        return SimpleNamespace(actions=ramp(seen["base"]))

    player = play(infer, rate_hz=100)
    assert player.step({"base": 1000}) is None
    player.reset()
    gate.set()
    wait_until(lambda: not player._busy)
    assert player.step({"base": 0}) is None
    wait_until(lambda: len(player.queue))
    assert player.step({"base": 0})[0] == 0.0


def test_an_error_reaches_the_control_loop(play):
    def infer(_):
        raise ConnectionError("the server is gone")

    player = play(infer, rate_hz=100)
    player.step({})
    wait_until(lambda: player._error is not None)
    with pytest.raises(ConnectionError, match="gone"):
        player.step({})
