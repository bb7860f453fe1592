"""A decision on the calling thread that an interrupt ends anywhere: no later decision sees anything half done."""

import contextlib
import dis
import functools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from toy_plan import noise, observation, plans

from innerloop.contract import ObservationError
from innerloop.runtime import machine as machines
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter
from innerloop.runtime.machine import Machine

WHERE = {str(Path(machines.__file__).with_name(f"{name}.py")) for name in ("refresh", "session", "tick", "windows")}


POINTS = ("CALL", "JUMP_BACKWARD", "RESUME", "STORE_ATTR", "STORE_SUBSCR")  # around which the state changes


@functools.cache
def points(code):
    """Where an interrupt is put: offsets of instructions. Not where a lock is held, which the interpreter itself guards."""
    listed = list(dis.get_instructions(code))
    if any(one.opname in ("BEFORE_WITH", "LOAD_SPECIAL") for one in listed):
        return frozenset()
    return frozenset(one.offset for one in listed if one.opname.startswith(POINTS))


class Interrupter:
    """Raises KeyboardInterrupt before the n-th such instruction in the files of `WHERE`; `seen` counts them."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in WHERE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in points(frame.f_code):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, call):
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


@pytest.fixture
def machine():
    made = Machine(plans())
    made._programs.graphs.update(dict.fromkeys(made._programs.names))  # decisions run where those of graphs do
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference():
    plan = plans()[8]
    interpreter = Interpreter(plan, Arena(plan))

    def answer(values):
        for name, value in values.items():
            interpreter.write(name, value)
        interpreter.run(skip=False)
        return interpreter.read("actions")[0].numpy()

    return answer


def test_decisions_run_on_the_calling_thread(machine, reference):
    seen = []
    inner = machine._tick.decide
    machine._tick.decide = lambda *given: seen.append(threading.get_ident()) or inner(*given)
    assert np.array_equal(machine.decide("a", observation(0), 8).outputs["actions"], reference(observation(0)))
    assert seen == [threading.get_ident()]


@pytest.mark.parametrize("other_first", [False, True])
def test_an_interrupt_anywhere_leaves_nothing_stale(machine, reference, other_first):
    """The session that was interrupted and another one, with all inputs and with the noise alone; a switch between."""
    now = {name: observation(seed) for seed, name in enumerate("ab")}
    for name, values in now.items():
        machine.decide(name, values, 8)
    interrupted, at = True, 1
    while interrupted:
        if other_first:
            machine.decide("b", {}, 8)
        given = observation(2 + at)
        interrupted = Interrupter(at).run(lambda given=given: machine.decide("a", given, 8))
        for name in ("ba", "ab")[at % 2]:
            now[name] = {**now[name], "noise": noise(at)}
            if name == "a":
                with contextlib.suppress(ObservationError):  # what was half taken is asked for again, by name
                    machine.decide("a", {"noise": noise(at)}, 8)
                now["a"] = {**given, "noise": noise(at)}
                answer = machine.decide("a", now["a"], 8)
            else:
                answer = machine.decide("b", {"noise": noise(at)}, 8)
            assert np.array_equal(answer.outputs["actions"], reference(now[name])), (at, name)
        at += 1
    assert at > 100


def test_threads_that_decide_at_once_take_turns(machine, reference):
    wrong = []

    def robot(name):
        for turn in range(40):
            values = observation(100 * ord(name) + turn)
            wrong.extend(
                []
                if np.array_equal(machine.decide(name, values, 8).outputs["actions"], expected[name, turn])
                else [turn]
            )

    expected = {(n, turn): reference(observation(100 * ord(n) + turn)) for n in "abcd" for turn in range(40)}
    robots = [threading.Thread(target=robot, args=(name,)) for name in "abcd"]
    for thread in robots:
        thread.start()
    while any(thread.is_alive() for thread in robots):
        machine.on_device(lambda: None)  # calls of the device's own thread come between
    assert wrong == []
