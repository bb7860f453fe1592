"""A tick that times its steps: apart from the hot path, because events and clocks cost time there."""

import time
from collections.abc import Mapping, Sequence

import torch

from innerloop.runtime.capture import Program
from innerloop.runtime.refresh import Ledger, Refresh, Step
from innerloop.runtime.tick import Due, Tick
from innerloop.runtime.windows import Kept, Value, Windows

COPY_IN = "copy_in"  # staging and upload of the inputs


class ProfiledTick(Tick):
    """`milliseconds` holds the last decision's time by program: device time on CUDA, host time elsewhere."""

    def __init__(self, refresh: Refresh, windows: Windows, programs: Sequence[Program], names: Sequence[str]) -> None:
        super().__init__(refresh, windows, programs)
        self.milliseconds: dict[str, float] = {}
        self._names = names
        self._events: list[torch.cuda.Event] = []
        if windows.pinned:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(len(programs) + 2)]  # type: ignore[no-untyped-call]
        self._due: Due = []
        self._began = 0.0

    def decide(self, steps: Sequence[Step], inputs: Mapping[str, Value], ledger: Ledger, kept: Kept) -> Due:
        """As a tick does, with a mark before the inputs are staged."""
        self._began = self._mark(-1)
        return super().decide(steps, inputs, ledger, kept)

    def replay(self, due: Due, ledger: Ledger) -> None:
        """Runs the due steps in order, a mark between them."""
        self._due = due
        clock = [self._mark(0)]
        for at, pair in enumerate(due):
            super().replay([pair], ledger)
            clock.append(self._mark(at + 1))
        self.milliseconds = {COPY_IN: 1e3 * (clock[0] - self._began)} | {
            self._names[step.key]: 1e3 * (clock[at + 1] - clock[at]) for at, (step, _) in enumerate(due)
        }

    def read(self) -> dict[str, float]:
        """Milliseconds by program of the last decision, once it has been waited for."""
        if self._events:
            self.milliseconds[COPY_IN] = self._events[-1].elapsed_time(self._events[0])
            for at, (step, _) in enumerate(self._due):
                self.milliseconds[self._names[step.key]] = self._events[at].elapsed_time(self._events[at + 1])
        return self.milliseconds

    def _mark(self, at: int) -> float:
        if self._events:
            self._events[at].record()
        return time.perf_counter()
