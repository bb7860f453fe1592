import logging
import threading
from pathlib import Path

import pytest
import torch
from toy_plan import noise, observation, plans

from innerloop.runtime import tick
from innerloop.runtime.machine import Machine


@pytest.fixture
def machine():
    made = Machine(plans())
    yield made
    made.close()


def test_a_thousand_ticks_log_nothing_create_no_lock_and_no_graph(machine, monkeypatch):
    machine.decide("a", observation(0), 8)
    calls = []
    monkeypatch.setattr(logging.Logger, "handle", lambda *a: calls.append("log"))
    for kind in ("Lock", "RLock", "Condition", "Event", "Semaphore"):
        monkeypatch.setattr(threading, kind, lambda *a, kind=kind: calls.append(kind))
    monkeypatch.setattr("builtins.print", lambda *a, **k: calls.append("print"))
    captures = machine.captures
    for turn in range(1, 1001):
        assert machine.decide("a", {"noise": noise(turn)}, 8).stages == ("action",)
    assert calls == []
    assert machine.captures == captures


def test_a_tick_waits_once(machine, monkeypatch):
    waits = []
    monkeypatch.setattr(machine._windows, "wait", lambda: waits.append(1))
    for turn in range(10):
        machine.decide("a", observation(turn), 8)
    assert len(waits) == 10


def test_the_buffers_stay_where_they_are(machine):
    before = {name: tensor.data_ptr() for name, tensor in machine._arena.tensors.items()}
    for turn in range(20):
        machine.decide("ab"[turn % 2], observation(turn), 8)
    assert before == machine._arena.addresses == {n: t.data_ptr() for n, t in machine._arena.tensors.items()}


def test_the_hot_path_is_one_short_file_without_torch():
    assert len(Path(tick.__file__).read_text().splitlines()) < 60
    assert not hasattr(tick, "torch")


def test_stages_run_without_gradients(machine):
    machine.decide("a", observation(), 8)
    assert all(not tensor.requires_grad for tensor in machine._arena.tensors.values())
    assert torch.is_grad_enabled()
