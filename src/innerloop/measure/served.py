"""A served policy at its clients: the time on the wire, and what many robots at once do to each other."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from innerloop.contract import InnerloopError
from innerloop.measure import provenance
from innerloop.measure.distribution import Distribution
from innerloop.measure.observations import Scene, frame_size, make_observations
from innerloop.measure.record import ServedRecord, ServedRow

WARMUP = 20  # calls of each client before its clock starts; the server is warm already
OBSERVATIONS = 8


class Answer(Protocol):
    """A chunk with the server's own clock in it."""

    @property
    def timing(self) -> Mapping[str, float]:
        """Milliseconds; queue_ms and total_ms are the server's."""
        ...


class Client(Protocol):
    """One robot's connection."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the server says of its policy."""
        ...

    def infer(self, observation: Mapping[str, Any]) -> Answer:
        """One decision."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass(frozen=True)
class ServedOptions:
    """clients: how many robots at once, one row each. ticks: calls of every client. frames: width x height."""

    prompt: str = "pick up the red block"
    frames: str = "224x224"
    clients: tuple[int, ...] = (1,)
    ticks: int = 500
    seed: int = 0


@dataclass(frozen=True)
class _Call:
    whole: float
    queue: float
    server: float


def clock_served(connect: Callable[[str], Client], options: ServedOptions, command: str) -> ServedRecord:
    """Closed loops at a server. `connect` opens a client under a session name. Raises what a client's call raises."""
    first = connect("measure")
    metadata = dict(first.metadata)
    first.close()
    scene = Scene(metadata["cameras"], frame_size(options.frames), int(metadata["state_dim"]))
    observations = make_observations(scene, options.prompt, OBSERVATIONS, options.seed)
    rows = [_row(connect, clients, observations, options.ticks) for clients in options.clients]
    return ServedRecord(
        **provenance.software(command),
        device=str(metadata["device"]),
        clocks={},
        policy=str(metadata["policy"]),
        precision=str(metadata["precision"]),
        fingerprint=str(metadata["fingerprint"]),
        inputs=provenance.inputs_digest(observations, ()),
        frames=f"{options.frames} raw",
        ticks=options.ticks,
        rows=rows,
    )


def _row(
    connect: Callable[[str], Client], clients: int, observations: Sequence[Mapping[str, Any]], ticks: int
) -> ServedRow:
    gate = threading.Barrier(clients + 1)
    with ThreadPoolExecutor(clients) as pool:
        robots = [
            pool.submit(_loop, connect, f"measure-{number}", observations, ticks, gate) for number in range(clients)
        ]
        with suppress(threading.BrokenBarrierError):  # a client failed before the start; its own error follows
            gate.wait()
        start = time.perf_counter()
        wait(robots)
        seconds = time.perf_counter() - start
    errors = [robot.exception() for robot in robots]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return _summary(clients, [call for robot in robots for call in robot.result()], seconds)


def _loop(
    connect: Callable[[str], Client],
    session: str,
    observations: Sequence[Mapping[str, Any]],
    ticks: int,
    gate: threading.Barrier,
) -> list[_Call]:
    with ExitStack() as unless_started:
        unless_started.callback(gate.abort)
        client = connect(session)
        unless_started.callback(client.close)
        for turn in range(WARMUP):
            client.infer(observations[turn % len(observations)])
        gate.wait()
        unless_started.pop_all()
    with closing(client):
        return [_call(client, observations[turn % len(observations)]) for turn in range(ticks)]


def _call(client: Client, observation: Mapping[str, Any]) -> _Call:
    start = time.perf_counter_ns()
    timing = client.infer(observation).timing
    whole = (time.perf_counter_ns() - start) / 1e6
    if "total_ms" not in timing:
        raise InnerloopError("the server does not say how long it took (total_ms); measure an innerloop server")
    return _Call(whole, timing.get("queue_ms", 0.0), timing["total_ms"])


def _summary(clients: int, calls: Sequence[_Call], seconds: float) -> ServedRow:
    whole = Distribution.of([call.whole for call in calls])
    return ServedRow(
        clients=clients,
        p50_ms=whole.p50,
        p95_ms=whole.p95,
        p99_ms=whole.p99,
        max_ms=whole.max,
        queue_ms=Distribution.of([call.queue for call in calls]).p50,
        server_ms=Distribution.of([call.server for call in calls]).p50,
        transport_ms=Distribution.of([call.whole - call.server for call in calls]).p50,
        decisions_per_s=len(calls) / seconds,
    )
