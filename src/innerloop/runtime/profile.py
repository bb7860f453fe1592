"""A tick that times its steps: apart from the hot path, because events and clocks cost time there."""

import time
from collections.abc import Mapping, Sequence

import torch

from innerloop.runtime.capture import Program
from innerloop.runtime.refresh import Ledger, Refresh
from innerloop.runtime.tick import Due, Rest, Tick
from innerloop.runtime.windows import Kept, Value, Windows

COPY_IN = "copy_in"  # staging and upload of the inputs
READING = "reading"  # of the marks themselves, after the decision: no part of it


class ProfiledTick(Tick):
    """`milliseconds` holds the last decision's time by program: device time on CUDA, host time elsewhere."""

    def __init__(self, refresh: Refresh, windows: Windows, programs: Sequence[Program], names: Sequence[str]) -> None:
        super().__init__(refresh, windows, programs)
        self.milliseconds: dict[str, float] = {}
        self._names = names
        self._events: list[torch.cuda.Event] = []
        if windows.pinned:
            count = len(programs) + 4  # one after each, and around the copies before either half of a decision
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._clock: list[tuple[str, float]] = []  # what ended, when

    def decide(self, inputs: Mapping[str, Value], rest: Rest, ledger: Ledger, kept: Kept) -> Due:
        """As a tick does, with a mark before the inputs are staged."""
        self._clock.clear()
        self._mark("")
        return super().decide(inputs, rest, ledger, kept)

    def replay(self, due: Due, ledger: Ledger) -> None:
        """Runs the due steps in order, a mark between them."""
        self._mark(COPY_IN)
        for pair in due:
            super().replay([pair], ledger)
            self._mark(self._names[pair[0].key])

    def read(self) -> dict[str, float]:
        """Milliseconds by program of the last decision, once it has been waited for."""
        began = time.perf_counter()
        self.milliseconds = {COPY_IN: 0.0}
        for at in range(1, len(self._clock)):
            name = self._clock[at][0]
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + self._spent(at)
        self.milliseconds[READING] = 1e3 * (time.perf_counter() - began)
        return self.milliseconds

    def _spent(self, at: int) -> float:
        if self._events:
            return float(self._events[at - 1].elapsed_time(self._events[at]))
        return 1e3 * (self._clock[at][1] - self._clock[at - 1][1])

    def _mark(self, name: str) -> None:
        if self._events:
            self._events[len(self._clock)].record(self.windows.stream)
        self._clock.append((name, time.perf_counter()))
