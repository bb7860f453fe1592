import gc
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from toy_plan import noise, observation, plans

from innerloop.contract import Buffer, CapsuleError, ObservationError, Plan, Role, Stage
from innerloop.runtime.backing import Backing
from innerloop.runtime.machine import Machine
from innerloop.runtime.refresh import Ledger
from innerloop.runtime.session import Session, SessionError


@pytest.fixture
def machine():
    made = Machine(plans(), sessions=4)
    yield made
    made.close()


def act(machine, session, seed):
    return machine.decide(session, {"noise": noise(seed)}, 8).outputs["actions"]


def test_there_is_a_limit_and_ending_a_session_makes_room(machine):
    for name in "abcd":
        machine.decide(name, observation(), 8)
    with pytest.raises(SessionError, match="4 sessions are open, which is the limit: end one"):
        machine.decide("e", observation(), 8)
    machine.session("b").end()
    machine.decide("e", observation(), 8)
    assert machine.sessions == ("a", "c", "d", "e")


@pytest.mark.parametrize("use", ["snapshot", "reset", "end", "decide"])
def test_an_ended_session_is_not_used_again(machine, use):
    session = machine.session("a")
    machine.decide(session, observation(), 8)
    session.end()
    with pytest.raises(SessionError, match="session 'a' has ended"):
        machine.decide(session, observation(), 8) if use == "decide" else getattr(session, use)()


def test_a_name_may_be_used_again_and_starts_from_nothing(machine):
    machine.decide("a", observation(), 8)
    machine.session("a").end()
    with pytest.raises(ObservationError, match="was never given"):
        act(machine, "a", 1)


def test_reset_forgets_the_episode_but_not_the_session(machine):
    machine.decide("a", observation(), 8)
    machine.session("a").reset()
    with pytest.raises(ObservationError, match="was never given"):
        act(machine, "a", 1)
    assert len(machine.decide("a", observation(), 8).stages) == 5


def test_a_fork_goes_on_alone(machine):
    machine.decide("a", observation(0), 8)
    twin = machine.session("a").fork("b")
    assert machine.decide(twin, {"noise": noise(3)}, 8).stages == ("action",)
    machine.decide(twin, observation(1), 8)
    alone = Machine(plans())
    alone.decide("a", observation(0), 8)
    assert np.array_equal(act(machine, "a", 4), act(alone, "a", 4))
    alone.decide("a", observation(1), 8)
    assert np.array_equal(act(machine, "b", 5), act(alone, "a", 5))
    alone.close()


def test_a_fork_needs_a_free_name(machine):
    machine.decide("a", observation(0), 8)
    machine.session("b")
    with pytest.raises(SessionError, match="'b' is open"):
        machine.session("a").fork("b")


def test_idle_sessions_expire(machine):
    machine.decide("old", observation(), 8)
    time.sleep(0.05)
    machine.decide("new", observation(), 8)
    assert machine.expire(0.04) == ["old"]
    assert machine.sessions == ("new",)


def test_thousands_of_sessions_leave_nothing_behind(machine):
    values = observation()

    def cycle(turns):
        for turn in range(turns):
            for name in (f"robot {turn}", f"other {turn}"):
                machine.decide(name, values, 8)
            machine.decide(f"robot {turn}", {"noise": noise(turn)}, 8)
            for name in (f"robot {turn}", f"other {turn}"):
                machine.session(name).end()

    def alive():
        gc.collect()
        return Counter(type(thing) for thing in gc.get_objects() if type(thing) in (Session, Backing, Ledger))

    cycle(5)
    before, things = machine.account(), alive()
    cycle(1000)
    assert machine.account() == before
    assert machine.account()["saved_host_used"] == 0
    assert machine.sessions == ()
    assert alive() == things


def test_the_last_of_many_sessions_answers_as_on_a_fresh_machine(machine):
    for turn in range(50):
        machine.decide(f"robot {turn}", observation(turn), 8)
        if turn < 49:
            machine.session(f"robot {turn}").end()
    fresh = Machine(plans())
    fresh.decide("robot 49", observation(49), 8)
    assert np.array_equal(act(machine, "robot 49", 1), act(fresh, "robot 49", 1))
    fresh.close()


def test_state_is_refused_while_a_decision_is_in_flight():
    started, go = threading.Event(), threading.Event()

    def slow(b):
        started.set()
        assert go.wait(10)
        b["kept"].copy_(b["x"])
        b["y"].copy_(b["x"])

    f32 = torch.float32
    listed = [Buffer("x", (1, 2), f32, Role.INPUT), Buffer("kept", (1, 2), f32, Role.STATE)]
    listed.append(Buffer("y", (1, 2), f32, Role.OUTPUT))
    plan = Plan("slow", {b.name: b for b in listed}, (Stage("s", slow, ("x",), ("kept", "y")),), {"x": "step"}, "f")
    machine = Machine({1: plan})
    go.set()
    machine.decide("a", {"x": np.zeros(2, np.float32)}, 1)
    capsule = machine.session("a").snapshot()
    go.clear()
    started.clear()
    thread = threading.Thread(target=lambda: machine.decide("a", {"x": np.ones(2, np.float32)}, 1))
    thread.start()
    assert started.wait(10)
    session = machine.session("a")
    for use in (session.snapshot, lambda: session.restore(capsule), lambda: session.fork("b")):
        with pytest.raises(CapsuleError, match="a decision of session 'a' is in flight"):
            use()
    assert machine.expire(0) == []
    go.set()
    thread.join()
    session.restore(capsule)
    machine.close()
