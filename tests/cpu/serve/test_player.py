"""Chunks on the robot while the next one is made in a thread: it never waits, errors arrive, episodes stay apart."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from serving_fakes import wait_until

from innerloop.client import ChunkPlayer


def ramp(start, horizon=50):
    """A plan that moves by one a step from `start`."""
    return (start + np.arange(horizon, dtype=np.float32))[:, None]


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
        action = player.step({"step": player.executor.executed})
        if action is not None:
            played.append(action[0])
        time.sleep(0.01)
    assert player.executor.starved <= 8  # the first call, and no other
    np.testing.assert_array_equal(played, np.arange(len(played)))


@pytest.mark.parametrize(("mode", "schedule"), [("realtime", "LINEAR"), ("prefix", "PREFIX")])
def test_in_real_time_the_policy_is_told_what_it_continues(play, mode, schedule):
    given = []

    def infer(seen, previous=None):
        given.append(previous)
        time.sleep(0.03)
        return SimpleNamespace(actions=ramp(seen["step"], 20))

    player = play(infer, rate_hz=100, mode=mode)
    for _ in range(60):
        player.step({"step": player.executor.executed})
        time.sleep(0.01)
    assert given[0] is None
    later = given[-1]
    assert later.schedule == schedule
    assert later.delay == min(player.executor.delay.steps, len(later.actions) - 1) > 0
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
    wait_until(lambda: len(player.executor))
    assert player.step({"base": 0})[0] == 0.0


@pytest.mark.parametrize("when", ["before the reset", "after it"])
def test_an_error_of_the_last_episode_ends_with_it(play, when):
    gate = threading.Event()

    def infer(seen):
        if seen["base"]:
            gate.wait(5)
            raise ConnectionError("stale: the episode of this request has ended")
        return SimpleNamespace(actions=ramp(0))

    player = play(infer, rate_hz=100)
    player.step({"base": 1})
    if when == "before the reset":
        gate.set()
        wait_until(lambda: player._error is not None)
    player.reset()
    gate.set()
    wait_until(lambda: not player._busy)
    player.step({"base": 0})
    wait_until(lambda: len(player.executor))
    assert player.step({"base": 0})[0] == 0.0


def test_an_error_reaches_the_control_loop(play):
    def infer(_):
        raise ConnectionError("the server is gone")

    player = play(infer, rate_hz=100)
    player.step({})
    wait_until(lambda: player._error is not None)
    with pytest.raises(ConnectionError, match="gone"):
        player.step({})
