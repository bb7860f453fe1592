import contextvars
import threading
import weakref

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


def left(thread, wait, take):
    return thread.call(lambda: thread.leave(wait, take))


def test_the_calling_thread_waits_and_takes_the_answer():
    thread, seen = DeviceThread(CPU), []
    ending = left(thread, lambda: seen.append(threading.get_ident()), lambda: (threading.get_ident(), "answer"))
    assert thread.end(ending) == (threading.get_ident(), "answer")
    assert seen == [threading.get_ident()]
    assert thread.call(lambda: 1) == 1  # which neither waits nor takes again
    assert len(seen) == 1


def test_the_next_call_comes_after_the_end_of_the_last_one():
    thread, order = DeviceThread(CPU), []
    ending = left(thread, lambda: order.append("wait"), lambda: order.append(threading.get_ident()) or "late")
    worker = thread.call(lambda: order.append("next") or threading.get_ident())
    assert order == ["wait", worker, "next"]
    assert thread.end(ending) == "late"
    assert order == ["wait", worker, "next"]


def test_a_call_from_the_thread_itself_comes_after_the_end_of_the_last_one_too():
    thread, order = DeviceThread(CPU), []

    def outer():
        ending = thread.leave(lambda: order.append("wait"), lambda: "first")
        return thread.call(lambda: order.append("inner")), ending.answer()

    assert thread.call(outer) == (None, "first")
    assert order == ["wait", "inner"]


def test_an_error_of_the_wait_is_raised_where_the_call_was_made_only():
    thread = DeviceThread(CPU)

    def fail():
        raise RuntimeError("the device has gone")

    ending = left(thread, fail, lambda: "never")
    with pytest.raises(RuntimeError, match="gone"):
        thread.end(ending)
    assert thread.call(lambda: 1) == 1
    ending = left(thread, fail, lambda: "never")
    assert thread.call(lambda: 2) == 2
    with pytest.raises(RuntimeError, match="gone"):
        thread.end(ending)


def test_an_interrupted_wait_is_done_before_the_next_call():
    thread, waits = DeviceThread(CPU), []

    def wait():
        waits.append(threading.get_ident())
        if len(waits) == 1:
            raise KeyboardInterrupt

    taken = []
    ending = left(thread, wait, lambda: taken.append(1))
    with pytest.raises(KeyboardInterrupt):
        thread.end(ending)
    assert taken == []
    assert thread.call(lambda: len(waits)) == 2
    assert taken == [1]


def test_an_answer_is_taken_once_though_two_threads_wait():
    for turn in range(200):
        thread, both, taken = DeviceThread(CPU), threading.Barrier(2, timeout=10), []
        ending = left(thread, both.wait, lambda taken=taken, turn=turn: taken.append(turn) or turn)
        other = threading.Thread(target=thread.call, args=(lambda: None,))
        other.start()
        assert thread.end(ending) == turn
        other.join()
        assert taken == [turn]


def test_an_ended_call_keeps_nothing_of_its_machine_alive():
    class Memory:
        pass

    thread, memory = DeviceThread(CPU), Memory()
    seen = weakref.ref(memory)
    thread.end(left(thread, lambda memory=memory: None, lambda memory=memory: 1))
    del memory
    assert seen() is None


def test_a_turn_on_the_calling_thread_comes_between_calls():
    thread, order = DeviceThread(CPU), []
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go_on.wait(10)
        order.append("call")

    other = threading.Thread(target=thread.call, args=(slow,))
    other.start()
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert thread.here(lambda: order.append("here") or threading.get_ident()) == threading.get_ident()
    other.join()
    assert order == ["call", "here"]
    assert thread.call(lambda: thread.here(threading.get_ident)) != threading.get_ident()  # already its own turn


def test_a_turn_comes_after_the_end_of_the_last_call_and_passes_on_after_an_error():
    thread, order = DeviceThread(CPU), []
    ending = left(thread, lambda: order.append("wait"), lambda: "late")
    assert thread.here(lambda: order.append("here")) is None
    assert order == ["wait", "here"]
    assert thread.end(ending) == "late"
    with pytest.raises(KeyError):
        thread.here(lambda: {}["nothing"])
    assert thread.call(lambda: 3) == thread.here(lambda: 3) == 3
