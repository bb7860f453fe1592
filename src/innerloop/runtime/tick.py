"""The hot path, whole: copy in, replay what is due, copy out; the caller waits once."""

from collections.abc import Mapping, Sequence

from innerloop.runtime.capture import Program
from innerloop.runtime.refresh import Ledger, Refresh, Step
from innerloop.runtime.windows import Given, Kept, Value, Windows

Due = list[tuple[Step, int]]


class Tick:
    """One decision of the session that holds the arena. Programs are graph replays on CUDA, eager stages elsewhere."""

    def __init__(self, refresh: Refresh, windows: Windows, programs: Sequence[Program]) -> None:
        self.refresh = refresh
        self.windows = windows
        self.programs = programs

    def decide(self, steps: Sequence[Step], inputs: Mapping[str, Value], ledger: Ledger, kept: Kept) -> Due:
        """Starts what `inputs` make due and the copy of the outputs into the host's windows.

        Steps that read large inputs alone come first, so that the device is at work while the host looks at the rest.
        """
        try:
            early, late = self.windows.look(inputs, self.refresh.first_inputs)
            first = self._start(self.refresh.first, early, ledger, kept)
            rest = self._start(steps, late, ledger, kept)
            self.windows.fetch()
        except BaseException:
            self.windows.mark()
            self.windows.wait()  # staging must not change under a copy
            raise
        return first + rest

    def _start(self, steps: Sequence[Step], given: Given, ledger: Ledger, kept: Kept) -> Due:
        self.windows.stage(given, ledger, kept)
        due = self.refresh.due(steps, ledger)
        self.windows.upload(due, ledger, kept)
        self.replay(due, ledger)
        return due

    def replay(self, due: Due, ledger: Ledger) -> None:
        """Runs the due steps in order."""
        refresh, programs = self.refresh, self.programs
        for step, mark in due:
            refresh.begin(step)
            programs[step.key]()
            refresh.commit(step, mark, ledger)
