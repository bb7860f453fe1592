"""Closed loops of several clients, against a server that takes one decision at a time."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from innerloop.contract import InnerloopError
from innerloop.measure.record import parse
from innerloop.measure.served import ServedOptions, clock_served

DECISION, WIRE = 0.004, 0.002


@dataclass
class FakeServer:
    """One decision at a time takes 4 ms; a message takes 2 ms there and back."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: list[str] = field(default_factory=list)
    closed: int = 0
    clock: bool = True

    def connect(self, session: str) -> "FakeClient":
        self.sessions.append(session)
        return FakeClient(self)


@dataclass
class Answered:
    timing: dict[str, float]


@dataclass
class FakeClient:
    server: FakeServer

    @property
    def metadata(self) -> dict[str, Any]:
        sizes = {"cameras": ["base"], "state_dim": 4}
        return {"policy": "toy", "precision": "bf16", "device": "cuda", "fingerprint": "f00", **sizes}

    def infer(self, observation: dict[str, Any]) -> Answered:
        assert observation["images"]["base"].shape == (24, 32, 3)
        time.sleep(WIRE)
        arrived = time.perf_counter()
        with self.server.lock:
            began = time.perf_counter()
            time.sleep(DECISION)
        done = time.perf_counter()
        timing = {"queue_ms": 1e3 * (began - arrived), "total_ms": 1e3 * (done - arrived)}
        return Answered(timing if self.server.clock else {})

    def close(self) -> None:
        self.server.closed += 1


def test_wire_and_queue_are_told_apart() -> None:
    server = FakeServer()
    options = ServedOptions(frames="32x24", clients=(1, 3), ticks=30)
    record = clock_served(server.connect, options, "innerloop bench --url ws://robot")
    assert parse(record.to_json()) == record
    alone, crowd = record.rows
    assert alone.queue_ms < 1 < 4 * DECISION * 1e3 / 3 < crowd.queue_ms
    assert alone.transport_ms == pytest.approx(WIRE * 1e3, rel=0.5)
    assert alone.p50_ms == pytest.approx(alone.server_ms + alone.transport_ms, rel=0.1)
    assert crowd.decisions_per_s > alone.decisions_per_s
    assert server.closed == len(server.sessions) == 1 + 1 + 3


def test_a_server_without_a_clock_is_refused() -> None:
    with pytest.raises(InnerloopError, match="total_ms"):
        clock_served(FakeServer(clock=False).connect, ServedOptions(frames="32x24", ticks=3), "")


def test_a_failing_client_is_told() -> None:
    def connect(session: str) -> FakeClient:
        if session == "measure-1":
            raise ConnectionError("no route")
        return FakeServer().connect(session)

    with pytest.raises(ConnectionError, match="no route"):
        clock_served(connect, ServedOptions(frames="32x24", clients=(3,), ticks=3), "")
