"""Many robots or episodes on one set of weights, graphs and buffers."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from innerloop.contract.errors import CapsuleError, InnerloopError
from innerloop.runtime.arena import Arena
from innerloop.runtime.backing import Pool, Saved
from innerloop.runtime.capsule import Capsule, Home, Tier, layout_digest, mismatch, renumbered, seal
from innerloop.runtime.executor import DeviceThread
from innerloop.runtime.refresh import NOTHING, Refresh
from innerloop.runtime.windows import Windows

T = TypeVar("T")


class SessionError(InnerloopError):
    """A session was used after its end, a name is taken, or there are too many."""


class Session:
    """The state of one robot or episode. Every method may be called from any thread."""

    def __init__(self, name: str, owner: "Sessions") -> None:
        self.name = name
        self.ledger = owner.refresh.ledger()
        self.kept = owner.windows.nothing()
        self.saved: Saved | None = None  # the state region, while another session has the arena
        self.used = time.monotonic()
        self.ended = False
        self.in_flight = 0  # decisions asked for and not yet answered
        self._owner = owner

    def snapshot(self, tier: Tier = "device") -> Capsule:
        """This session's state, inputs and versions. Raises CapsuleError while a decision is in flight."""
        return self._owner.on_device(self, lambda: self._owner.snapshot(self, tier))

    def restore(self, capsule: Capsule, verify: bool | None = None) -> None:
        """Back to a snapshot of this policy, by this session or another one.

        verify: read every byte before anything changes; by default only for the host tier, where it costs no device
        time. Raises CapsuleError, with the session as it was, on damage, a wrong fingerprint or a decision in flight.
        """
        self._owner.on_device(self, lambda: self._owner.restore(self, capsule, verify))

    def fork(self, name: str) -> "Session":
        """A new session that goes on from here; this one is not touched. Raises SessionError if the name is taken."""
        return self._owner.on_device(self, lambda: self._owner.fork(self, name))

    def reset(self) -> None:
        """Forgets the episode: the next decision needs every input and runs every stage."""
        self._owner.call(self, lambda: self._owner.reset(self))

    def end(self) -> None:
        """Gives the session's memory back; any later use raises SessionError."""
        self._owner.call(self, lambda: self._owner.end(self))

    def asked(self) -> None:
        """Marks a decision as in flight; `answered` must follow."""
        with self._owner.guard:
            self.in_flight += 1

    def answered(self) -> None:
        """The end of what `asked` began."""
        with self._owner.guard:
            self.in_flight -= 1


class Sessions:
    """Which session holds the arena, and copies of the state of the others.

    Up to `resident` copies stay in device memory; the least recently used beyond that are parked in host memory.
    Methods that touch the device run on its thread only.
    """

    def __init__(
        self, arena: Arena, refresh: Refresh, windows: Windows, thread: DeviceThread, limit: int, resident: int
    ) -> None:
        self.refresh = refresh
        self.windows = windows
        self.guard = threading.Lock()
        self.open: dict[str, Session] = {}
        self.fingerprint = ""
        self.home = Home(Pool(arena.state), thread, refresh)
        self._state = arena.state
        self._digest = layout_digest(arena.layout, refresh)
        self._limit = limit
        self._resident = resident
        self._active: Session | None = None

    def rename(self, fingerprint: str) -> None:
        """Capsules from now on are of this policy fingerprint."""
        self.fingerprint = f"{fingerprint}:{self._digest}"

    def get(self, name: str) -> Session:
        """The session of this name, opened if need be. Raises SessionError at the limit."""
        with self.guard:
            session = self.open.get(name)
            return session if session is not None else self._new(name)

    def call(self, session: Session, function: Callable[[], T]) -> T:
        """Runs a function of a session that has not ended on the device's thread."""

        def checked() -> T:
            self.check(session)
            return function()

        return self.home.thread.call(checked)

    def on_device(self, session: Session, function: Callable[[], T]) -> T:
        """The same, refused while a decision of the session is in flight."""
        if session.in_flight:
            raise CapsuleError(f"a decision of session '{session.name}' is in flight: wait for its answer first")
        return self.call(session, function)

    def check(self, session: Session) -> None:
        """Raises SessionError for a session that has ended."""
        if session.ended:
            raise SessionError(f"session '{session.name}' has ended: open another one")

    def hold(self, session: Session) -> None:
        """Gives the arena to a session; the one that had it is saved first."""
        self.check(session)
        session.used = time.monotonic()
        if self._active is session:
            return
        with self.home.thread.on_stream():
            self.release()
            if session.saved is not None:
                self._load(session.saved)
        self._active = session

    def release(self) -> None:
        """Saves the session that has the arena and takes the arena from it."""
        if self._active is not None:
            self._store(self._active)
            self._active = None
            self._park()

    def snapshot(self, session: Session, tier: Tier) -> Capsule:
        """See Session.snapshot."""
        saved = self._stored(session)
        if saved is None:
            raise CapsuleError(f"session '{session.name}' has decided nothing yet: there is no state to keep")
        if self._state.is_cuda and saved.backing.on_host != (tier == "host"):
            saved = Saved(self.home.pool.copy(saved.backing.data, host=tier == "host"), saved.contents)
        return seal(self.fingerprint, tier, saved, session.ledger.copy(), list(session.kept), self.home)

    def restore(self, session: Session, capsule: Capsule, verify: bool | None) -> None:
        """See Session.restore. The copy into the arena comes before the commit, which cannot fail."""
        if capsule.fingerprint != self.fingerprint:
            raise CapsuleError(mismatch(capsule.fingerprint, self.fingerprint))
        if verify or (verify is None and capsule.tier == "host"):
            capsule.verify()
        capsule = self._adopted(capsule)
        if self._active is session:
            self._store(session)
            self._active = None
            self._load(capsule.saved)
            self._active = session
        session.ledger, session.kept, session.saved = capsule.ledger.copy(), list(capsule.values), capsule.saved

    def fork(self, session: Session, name: str) -> Session:
        """See Session.fork."""
        saved = self._stored(session)
        with self.guard:
            if name in self.open:
                raise SessionError(f"a session named '{name}' is open: end it or choose another name")
            twin = self._new(name)
        twin.ledger, twin.kept, twin.saved = session.ledger.copy(), list(session.kept), saved
        return twin

    def reset(self, session: Session) -> None:
        """See Session.reset."""
        session.ledger, session.kept, session.saved = self.refresh.ledger(), self.windows.nothing(), None

    def end(self, session: Session) -> None:
        """See Session.end."""
        self.reset(session)
        session.ended = True
        if self._active is session:
            self._active = None
        with self.guard:
            self.open.pop(session.name, None)

    def forget_runs(self) -> None:
        """Weights have changed: every stage of every session is due, and no computed value counts."""
        with self.guard:
            for session in self.open.values():
                session.ledger.ran = [None] * len(session.ledger.ran)
        self.refresh.forget()

    def _adopted(self, capsule: Capsule) -> Capsule:
        """The capsule with content numbers of this runtime."""
        if capsule.home is self.home:
            return capsule
        if capsule.tier != "host":
            raise CapsuleError("the capsule lies in another runtime's device memory: move it with capsule.to('host')")
        ledger, contents = renumbered(
            capsule.ledger.versions, capsule.ledger.ran, capsule.saved.contents, self.refresh.fresh
        )
        saved = Saved(capsule.saved.backing, contents)
        return dataclasses.replace(capsule, saved=saved, ledger=ledger, home=self.home)

    def _new(self, name: str) -> Session:
        if len(self.open) >= self._limit:
            raise SessionError(
                f"{self._limit} sessions are open, which is the limit: end one (Session.end), or those that have been idle "
                "(Machine.expire)"
            )
        session = self.open[name] = Session(name, self)
        return session

    def _stored(self, session: Session) -> Saved | None:
        if self._active is session:
            self._store(session)
        return session.saved

    def _store(self, session: Session) -> None:
        """Brings a session's saved copy up to the arena; free where nothing has changed."""
        self.windows.save(session.ledger, session.kept)
        versions, present = session.ledger.versions, self.refresh.present
        contents = tuple(versions[i] if present[i] == versions[i] else NOTHING for i in self.refresh.owned)
        if not any(content > 0 for content in contents):
            session.saved = None
        elif session.saved is None or session.saved.contents != contents:
            session.saved = Saved(self.home.pool.copy(self._state, host=False), contents)

    def _load(self, saved: Saved) -> None:
        present, owned = self.refresh.present, self.refresh.owned
        if all(present[i] == content for i, content in zip(owned, saved.contents, strict=True)):
            return
        for i in owned:
            present[i] = NOTHING
        self._state.copy_(saved.backing.data, non_blocking=True)
        for i, content in zip(owned, saved.contents, strict=True):
            present[i] = content

    def _park(self) -> None:
        """Moves the least recently used state copies to host memory, while there are too many on the device."""
        if not self._state.is_cuda:
            return
        with self.guard:
            held = [s for s in self.open.values() if s.saved is not None and not s.saved.backing.on_host]
        for session in sorted(held, key=lambda s: s.used)[: max(len(held) - self._resident, 0)]:
            saved = session.saved
            if saved is not None:
                session.saved = Saved(self.home.pool.copy(saved.backing.data, host=True), saved.contents)
