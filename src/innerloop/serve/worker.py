"""The one thread that owns the engine. Network loops submit requests and get each answer exactly once."""

import enum
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from innerloop.contract import Chunk, Policy
from innerloop.contract.errors import InnerloopError
from innerloop.process.action import ActionLimits
from innerloop.serve.decide import close, decide, describe, end_session, largest_batch, self_check
from innerloop.serve.metrics import Metrics
from innerloop.serve.pending import Entry, Pending
from innerloop.serve.protocol import Reply, Request, RequestError
from innerloop.serve.sessions import Session, Sessions

log = logging.getLogger(__name__)
T = TypeVar("T")
FORGETTING = 0.98  # of the time estimated for larger batches, at each smaller one


class State(enum.StrEnum):
    """Where the worker is in its life."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Worker:
    """Loads the policy in its own thread and makes all its decisions there.

    `load` returns a policy that is captured and warm. Requests that arrive before are held.
    """

    def __init__(
        self,
        load: Callable[[], Policy],
        metrics: Metrics,
        *,
        capacity: int = 64,
        limits: ActionLimits | None = None,
    ) -> None:
        self.metrics = metrics
        self.state = State.WARMING
        self.failure: Exception | None = None
        self.version = 0
        self.policy: Policy | None = None
        self._load = load
        self._limits = limits
        self._changed = threading.Condition()
        self._pending = Pending(capacity)
        self._sessions = Sessions(capacity)
        self._jobs: deque[Callable[[], None]] = deque()
        self._running: list[Entry] = []
        self._largest = 1
        self._seconds: dict[int, float] = {}  # moving average by batch size
        self._listeners: list[Callable[[State], None]] = []
        self._thread = threading.Thread(target=self._live, name="innerloop-worker", daemon=True)

    def start(self) -> None:
        """Begin loading; returns at once."""
        self._thread.start()

    def on_state(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the present state and then, from the worker's thread, with every new one."""
        with self._changed:
            self._listeners.append(listener)
            state = self.state
        listener(state)

    def submit(self, request: Request, client: str, deliver: Callable[[Reply], None]) -> None:
        """Queue a request; `deliver` is called from any thread, once, unless the client leaves before."""
        entry = Entry(request, client, deliver)
        refusals: list[tuple[Entry, str, str]] = []
        with self._changed:
            try:
                older = self._admit(entry)
            except RequestError as error:
                refusals.append((entry, error.code, str(error)))
            else:
                if older is not None:
                    refusals.append((older, *_replaced(older, entry)))
            self._changed.notify()
        for refused, code, message in refusals:
            self._answer(refused, Reply(refused.request, code=code, message=message, weights_version=self.version))

    def reset(self, session: str, episode: str | int | None = None) -> "Future[None]":
        """Start a new episode: what the session asked before becomes stale. Done when the policy has reset."""
        with self._changed:
            known = self._sessions.get(session)
            if known is None:  # nothing was asked in its name, so there is nothing to forget
                done: Future[None] = Future()
                done.set_result(None)
                return done
            known.epoch += 1
            known.episode = episode
            stale = self._pending.drop(session)
            done = self._post(functools.partial(self._forget, session))
        if stale is not None:
            self._answer(stale, Reply(stale.request, code="stale", message="the episode was reset meanwhile"))
        return done

    def leave(self, client: str) -> None:
        """A client is gone: drop what it has waiting, discard what runs for it, end its sessions."""
        with self._changed:
            self.metrics.drop("vanished", self._pending.drop_client(client))
            for entry in self._running:
                entry.abandoned = entry.abandoned or entry.client == client
            self._end(self._sessions.leave(client))

    def expire(self, seconds: float) -> None:
        """End the sessions that have been silent for so long and wait for nothing."""
        with self._changed:
            self._end(self._sessions.expire(seconds, self._at_work()))

    def replace(self, load: Callable[[], Policy]) -> "Future[int]":
        """Swap the policy between two decisions; the result is the new weights version.

        If `load` or its check fails, the old policy stays and the future holds the error.
        """
        with self._changed:
            if self.state is not State.READY:
                raise InnerloopError(f"weights are replaced only in a ready server, and this one is {self.state}")
            return self._post(lambda: self._swap(load))

    def drain(self) -> "Future[None]":
        """Refuse new requests, finish those accepted, then end the thread."""
        done: Future[None] = Future()
        with self._changed:
            if self.state in (State.FAILED, State.STOPPED):
                done.set_result(None)
                return done
            self._become(State.DRAINING)
        self.on_state(lambda state: done.set_result(None) if state in (State.STOPPED, State.FAILED) else None)
        with self._changed:
            self._changed.notify()
        return done

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def sessions(self) -> list[Session]:
        """Copies of the open sessions."""
        with self._changed:
            return [replace(session, clients=set(session.clients)) for session in self._sessions.all()]

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._pending)

    def _admit(self, entry: Entry) -> Entry | None:
        if self.state not in (State.WARMING, State.READY):
            raise RequestError(str(self.state), f"the server is {self.state} and takes no requests; reconnect later")
        request = entry.request
        if self._pending.full_for(request.session):
            raise RequestError("busy", f"{self._pending.capacity} requests are waiting; retry with a newer observation")
        session, ended = self._sessions.join(request.session, entry.client, self._at_work)
        self._end(ended)
        if request.episode is not None and request.episode != session.episode:
            if session.episode is not None or session.decisions:
                self._post(functools.partial(self._forget, request.session))
            session.episode = request.episode
            session.epoch += 1
        session.images = request.observation["images"]
        entry.epoch = session.epoch
        return self._pending.put(entry)

    def _at_work(self) -> set[str]:
        return {*self._pending.sessions(), *(entry.request.session for entry in self._running)}

    def _post(self, job: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:  # the caller's future carries it
                done.set_exception(error)

        self._jobs.append(run)
        self._changed.notify()
        return done

    def _end(self, names: list[str]) -> None:
        for name in names:
            self._post(functools.partial(self._forget, name, True))

    def _forget(self, session: str, for_good: bool = False) -> None:
        if self.policy is None:
            return
        if for_good:
            end_session(self.policy, session)
        else:
            self.policy.reset(session)

    def _swap(self, load: Callable[[], Policy]) -> int:
        policy = load()
        self_check(policy, self._limits)
        old, self.policy = self.policy, policy
        if old is not None and old is not policy:
            close(old)
        self._largest = largest_batch(policy)
        self._seconds.clear()
        self.version += 1
        self.metrics.version(self.version)
        return self.version

    def _become(self, state: State) -> None:
        with self._changed:
            self.state = state
            listeners = list(self._listeners)
        for listener in listeners:
            listener(state)

    def _live(self) -> None:
        try:
            policy = self._load()
            self_check(policy, self._limits)
        except Exception as error:  # reported to every client and by run_server
            # an error of ours names its remedy; a trace of it would only hide that
            log.error("the policy could not be made ready", exc_info=not isinstance(error, InnerloopError))
            self._fail(error)
            return
        self.policy = policy
        self._largest = largest_batch(policy)
        with self._changed:
            if self.state is State.WARMING:
                self._become(State.READY)
        try:
            while self._step():
                pass
        except Exception as error:  # a fault of this file: nobody must wait for a thread that is gone
            log.exception("the worker ended")
            self._fail(error)
            return
        close(self.policy)
        self._become(State.STOPPED)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._become(State.FAILED)
        with self._changed:
            waiting = [*self._running, *self._pending.drop_all()]
        for entry in waiting:
            self._answer(entry, Reply(entry.request, code="failed", message="the policy cannot decide any more"))

    def _step(self) -> bool:
        with self._changed:
            while not (self._jobs or self._pending or self.state is State.DRAINING):
                self._changed.wait()
            jobs, self._jobs = self._jobs, deque()
            batch, late = ([], []) if jobs else self._pending.take(self._largest, self._seconds)
            self._running = batch
            finished = not (jobs or batch or late)
        for job in jobs:
            job()
        for entry in late:
            self._answer(entry, _late(entry, self.version))
        if batch:
            self._serve(batch)
        return not finished

    def _serve(self, batch: list[Entry]) -> None:
        assert self.policy is not None
        started = time.perf_counter()
        for entry in batch:
            entry.started = started
        outcomes = decide(self.policy, batch, self._limits)
        ended = time.perf_counter()
        elapsed = ended - started
        average = self._seconds.get(len(batch), elapsed)
        self._seconds[len(batch)] = 0.8 * average + 0.2 * elapsed
        for size in self._seconds:
            if size > len(batch):  # one slow call must not keep a size from ever being tried again
                self._seconds[size] *= FORGETTING
        for entry, (outcome, violations) in zip(batch, outcomes, strict=True):
            entry.finished = entry.finished or ended
            self._finish(entry, outcome, violations)
        with self._changed:
            self._running = []

    def _finish(self, entry: Entry, outcome: Chunk | Exception, violations: int) -> None:
        with self._changed:
            session = self._sessions.get(entry.request.session)
            stale = session is None or session.epoch != entry.epoch
            if session is not None:
                session.decisions += 1
                session.last_ms = (entry.finished - entry.arrived) * 1000
        if entry.abandoned:
            self.metrics.drop("vanished", 1)
            return
        if isinstance(outcome, Exception):
            code, message = describe(outcome)
            reply = Reply(entry.request, code=code, message=message, weights_version=self.version)
        elif stale:
            reply = Reply(entry.request, code="stale", message="the episode of this request has ended")
        elif time.perf_counter() > entry.deadline:
            reply = _late(entry, self.version)
        else:
            reply = Reply(
                entry.request,
                chunk=_signed(outcome, self.version),
                weights_version=self.version,
                violations=violations,
                server_timing=_timing(entry),
            )
        self._answer(entry, reply)

    def _answer(self, entry: Entry, reply: Reply) -> None:
        if entry.answered:
            return
        entry.answered = True
        try:
            if not entry.abandoned:
                entry.deliver(reply)
            self.metrics.record(entry, reply)
        except Exception:  # the edge of the server: an answer that cannot be written must not end the others'
            log.exception("the answer to session %r could not be delivered", entry.request.session)


def _replaced(older: Entry, newer: Entry) -> tuple[str, str]:
    if older.epoch != newer.epoch:
        return "stale", "the episode of this request has ended"
    return "superseded", "a newer observation of the same session arrived before this one was started"


def _signed(chunk: Chunk, version: int) -> Chunk:
    if chunk.receipt is None:
        return chunk
    return replace(chunk, receipt=replace(chunk.receipt, weights_version=version))


def _late(entry: Entry, version: int) -> Reply:
    waited = (time.perf_counter() - entry.arrived) * 1000
    message = f"the deadline of {entry.request.deadline_ms:g} ms passed after {waited:.1f} ms; the answer was dropped"
    return Reply(entry.request, code="late", message=message, weights_version=version, server_timing=_timing(entry))


def _timing(entry: Entry) -> dict[str, float]:
    now = time.perf_counter()
    started = entry.started or now
    finished = entry.finished or started
    return {
        "queue_ms": (started - entry.arrived) * 1000,
        "infer_ms": (finished - started) * 1000,
        "total_ms": (now - entry.arrived) * 1000,
    }
