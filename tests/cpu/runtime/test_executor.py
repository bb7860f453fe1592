import contextvars
import threading

import pytest
import torch

from innerloop.runtime.executor import DeviceThread, owner

CPU = torch.device("cpu")


def test_one_thread_runs_everything():
    thread = DeviceThread(CPU)
    seen = []

    def ask():
        seen.append(thread.call(threading.get_ident))

    callers = [threading.Thread(target=ask) for _ in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()


def test_every_caller_gets_its_own_answer():
    thread = DeviceThread(CPU)
    wrong = []

    def ask(who):
        for turn in range(200):
            answer = thread.call(lambda turn=turn: (who, turn))
            wrong.extend([answer] if answer != (who, turn) else [])

    callers = [threading.Thread(target=ask, args=(who,)) for who in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_an_error_is_raised_where_the_call_was_made_and_the_thread_lives_on():
    thread = DeviceThread(CPU)

    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        thread.call(fail)
    assert thread.call(lambda: 5) == 5


def test_a_call_from_the_thread_itself_does_not_wait_for_itself():
    thread = DeviceThread(CPU)
    assert thread.call(lambda: thread.call(lambda: 7)) == 7


def test_a_device_has_one_owner():
    assert owner(CPU) is owner(torch.device("cpu"))


def test_a_wait_that_is_interrupted_cannot_answer_the_next_call(monkeypatch):
    thread = DeviceThread(CPU)
    thread.call(lambda: 0)
    reply = thread._local.reply

    class Interrupted:
        def acquire(self):
            raise KeyboardInterrupt

        def release(self):
            pass

    monkeypatch.setattr(reply, "done", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        thread.call(lambda: "late")
    assert thread.call(lambda: "mine") == "mine"


def test_machines_run_in_the_context_they_were_made_in():
    from toy_plan import Weights, observation, plans, stages

    from innerloop.contract import Plan, Stage
    from innerloop.runtime.machine import Machine

    choice = contextvars.ContextVar("choice", default="none")
    seen = []
    shared, context, last = stages(Weights())
    spy = Stage("prompt", lambda b: (seen.append(choice.get()), shared[1].run(b)), shared[1].reads, shared[1].writes)
    toy = plans()[8]
    token = choice.set("made")
    machine = Machine({8: Plan("toy", toy.buffers, (shared[0], spy, *shared[2:], context(8), last), toy.ticks, "f")})
    choice.reset(token)
    machine.decide("a", observation(), 8)
    assert seen == ["made"]
    machine.close()
