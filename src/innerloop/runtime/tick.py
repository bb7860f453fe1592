"""The hot path, whole: copy in, replay what is due, copy out; the caller waits once."""

from collections.abc import Callable, Mapping, Sequence

from innerloop.runtime.capture import Program
from innerloop.runtime.refresh import Ledger, Refresh, Step
from innerloop.runtime.windows import Given, Kept, Value, Windows

Due = list[tuple[Step, int]]
Rest = Callable[[], tuple[Mapping[str, Value], Sequence[Step]]]  # inputs that come later, and the plan's steps


class Tick:
    """One decision of the session that holds the arena. Programs are graph replays on CUDA, eager stages elsewhere."""

    def __init__(self, refresh: Refresh, windows: Windows, programs: Sequence[Program]) -> None:
        self.refresh = refresh
        self.windows = windows
        self.programs = programs

    def decide(self, inputs: Mapping[str, Value], rest: Rest, ledger: Ledger, kept: Kept) -> Due:
        """Starts what the inputs make due and the copy of the outputs into the host's windows.

        Steps that images alone reach come first, so that the device is at work while the host looks at everything else
        and asks for the rest, whose copies then go beside that work.
        """
        windows, first = self.windows, self.refresh.first
        try:
            early, late = windows.look(inputs, self.refresh.first_inputs)
            begun = self._start(first, [early], ledger, kept, beside=False)
            more, steps = rest()
            given = [late, windows.look(more, frozenset())[1]]
            due = self._start(steps, given, ledger, kept, beside=bool(begun))
            windows.fetch()
        except BaseException:
            windows.mark()
            windows.wait()  # staging must not change under a copy
            raise
        return begun + due

    def _start(self, steps: Sequence[Step], given: Sequence[Given], ledger: Ledger, kept: Kept, beside: bool) -> Due:
        with self.windows.beside(beside):
            for values in given:
                self.windows.stage(values, ledger, kept)
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
