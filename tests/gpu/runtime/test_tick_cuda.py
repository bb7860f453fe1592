"""The hot path: no allocation, one wait, no log; the same bits whoever asks; no growth."""

import gc
import logging
import threading
import warnings

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 1 << 20


def test_a_thousand_ticks_allocate_nothing_wait_once_each_and_log_nothing(subject, monkeypatch):
    asked = [subject.inputs(seed, 1 + seed) for seed in range(8)]
    for inputs in asked:
        subject.decide("a", inputs)
    calls = []

    def counted(owner, name):
        original = getattr(owner, name)

        def wrapper(*arguments, **named):
            calls.append(name if owner is torch.cuda else f"{owner.__name__}.{name}")
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapper)

    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
    ):
        counted(owner, name)
    counted(torch.cuda, "graph")
    monkeypatch.setattr(logging.Logger, "handle", lambda *a: calls.append("log"))
    before = torch.cuda.memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(1000):
            subject.decide("a", asked[turn % 8])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries", "num_ooms"):
        assert after.get(key) == before.get(key), key
    assert calls == ["Event.synchronize"] * 1000


def test_calls_from_twenty_threads_get_equal_bits(subject):
    inputs = subject.inputs(0)
    expected, _ = subject.decide("a", inputs)
    answers = []

    def ask(who):
        for turn in range(5):
            subject.decide(f"other {who % 3}", subject.inputs(who + turn + 1))
            answers.append(subject.decide("a", inputs)[0])

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 100
    assert all(torch.equal(expected, answer) for answer in answers)


def test_what_ran_between_changes_no_bit(subject):
    first, _ = subject.decide("a", subject.inputs(0))
    for seed in range(1, 100):
        subject.decide("a", subject.inputs(seed, 1 + seed % subject.longest))
        again, _ = subject.decide("a", subject.inputs(0))
        assert torch.equal(first, again), seed


def test_an_input_with_nan_spoils_only_its_own_answer(subject):
    good = subject.inputs(0)
    expected, _ = subject.decide("a", good)
    bad = {**good, "noise": np.full_like(good["noise"], np.nan)}
    assert subject.decide("a", bad)[0].isnan().any()
    assert torch.equal(subject.decide("a", good)[0], expected)


def test_memory_does_not_grow(subject):
    def used():
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return total - free

    marks = {}
    for turn in range(500):
        subject.decide(f"robot {turn % 5}", subject.inputs(turn, 1 + turn % min(50, subject.longest)))
        if turn in (49, 499):
            marks[turn] = used()
    assert marks[499] - marks[49] <= 16 * MIB


def test_new_noise_replays_only_the_action_stage(subject):
    inputs = subject.inputs(0)
    subject.decide("a", inputs)
    actions, stages = subject.decide("a", {**inputs, "noise": subject.noise(9)})
    assert stages == ("action",)
    expected = subject.interpreted(
        subject.capacity(int(inputs["prompt_length"][0])), {**inputs, "noise": subject.noise(9)}
    )
    assert torch.equal(actions, expected)


def test_a_profiled_decision_adds_up(subject):
    subject.decide("a", subject.inputs(0))
    inputs = subject.inputs(1)
    capacity = subject.capacity(int(inputs["prompt_length"][0]))
    timing = subject.machine.decide("a", inputs, capacity, profile=True).timing
    stages = {name: ms for name, ms in timing.items() if name != "run"}
    assert "action" in stages
    assert all(0 < ms < timing["run"] for ms in stages.values())
    assert sum(stages.values()) < timing["run"]


def test_the_caller_waits_itself_unless_it_captures(subject, monkeypatch):
    inputs = subject.inputs(0)
    expected, _ = subject.decide("a", inputs)
    waited = []
    synchronize = torch.cuda.Event.synchronize
    monkeypatch.setattr(
        torch.cuda.Event, "synchronize", lambda event: (waited.append(threading.get_ident()), synchronize(event))
    )
    subject.decide("a", subject.inputs(1))
    assert waited == [threading.get_ident()]
    number, graph, stream = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        number.add_(1)
        answer, _ = subject.decide("a", inputs)
    graph.replay()
    assert number.item() == 1
    assert torch.equal(answer, expected)
    assert len(waited) == 2
    assert waited[1] != threading.get_ident()


def test_decisions_of_many_sessions_at_once_are_those_of_one_after_another(subject):
    asked = [subject.inputs(seed) for seed in range(4)]
    expected = [subject.decide("a", inputs)[0] for inputs in asked]
    wrong = []

    def ask(who):
        for turn in range(25):
            answer, _ = subject.decide(f"s{who % 3}", asked[(who + turn) % 4])
            wrong.extend([] if torch.equal(answer, expected[(who + turn) % 4]) else [(who, turn)])

    callers = [threading.Thread(target=ask, args=(who,)) for who in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_copies_that_arrive_late_beside_the_first_steps_are_waited_for(subject, monkeypatch):
    """And without the wait they would not be, wherever there are such copies."""
    asked = [subject.inputs(seed) for seed in range(6)]
    expected = [subject.decide("a", inputs)[0] for inputs in asked]
    queue, beside = subject.machine._windows.queue, []
    copy = queue.copy_aside

    def late(*given):
        beside.append(given)
        with torch.cuda.stream(queue._aside):
            torch.cuda._sleep(4_000_000)  # some 2 ms
        copy(*given)

    monkeypatch.setattr(queue, "copy_aside", late)
    for inputs, answer in zip(asked, expected, strict=True):
        assert torch.equal(subject.decide("a", inputs)[0], answer)
    monkeypatch.setattr(queue, "join", lambda: None)
    found = []
    for inputs in asked:
        found.append(subject.decide("a", inputs)[0])
        torch.cuda.synchronize()  # the copies of an unguarded decision must not reach into the next one
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True)) == bool(beside)
