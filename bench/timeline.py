"""Where the time of real decisions goes on the host: a time line by part, the device's own marks beside it.

Each part ends at a mark, which costs about a microsecond; the whole call is timed without marks as well. The device's
marks are events of another pass, because they cost more; an event that the idle device records ties its clock to the
host's, some microseconds late.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from innerloop.engine import LoadedPolicy
from innerloop.measure.message import Message
from innerloop.measure.observations import frame_size
from innerloop.measure.subject import make_workload

SESSION = "time line"
WARM_UP = 50
EVENTS = 100  # decisions with the device's marks
Infer = Callable[[int], object]


@dataclass(frozen=True)
class Part:
    """Microseconds: of the part itself, and from the start of the call to its end (p50)."""

    name: str
    p10: float
    p50: float
    p90: float
    ends: float


@dataclass(frozen=True)
class Line:
    """One frame size. whole: microseconds of the call without marks (p10, p50, p90)."""

    frames: str
    whole: tuple[float, float, float]
    parts: tuple[Part, ...]
    device: tuple[Part, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class Marks:
    """Names and host clock of one decision's marks; on a device that has events, also those of the device."""

    def __init__(self) -> None:
        self.named: list[tuple[str, int]] = []
        self.events: list[tuple[str, torch.cuda.Event]] = []
        self.record = False
        self.tied = 0  # host clock when the first event was asked for
        self._pool: list[torch.cuda.Event] = []
        self.stream: torch.cuda.Stream | None = None  # the policy's

    def mark(self, name: str) -> None:
        """The part of this name ends here."""
        self.named.append((name, time.perf_counter_ns()))

    def event(self, name: str) -> None:
        """The same on the device's clock, in stream order."""
        if not self.record:
            return
        if len(self.events) == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        if not self.events:
            self.tied = time.perf_counter_ns()
        event = self._pool[len(self.events)]
        event.record(self.stream)
        self.events.append((name, event))

    def clear(self) -> None:
        """Before the next decision."""
        self.named.clear()
        self.events.clear()


def time_line(policy: LoadedPolicy, frames: str, tokens: int, count: int) -> Line:
    """p50 of `count` decisions from messages of raw frames (WIDTHxHEIGHT), everything new in each of them."""
    load = make_workload(policy, frame_size(frames), tokens, Message("raw"), 0)
    messages = [load.wire.pack(one) for one in load.observations]
    marks = Marks()

    def infer(turn: int) -> None:
        place = turn % len(messages)
        marks.mark("begin")
        observation = load.wire.unpack(messages[place])
        marks.mark("receive")
        policy.infer(observation, noise=load.noises[place], session=SESSION)
        marks.mark("receipt, chunk")

    for turn in range(WARM_UP):
        infer(turn)
    whole = [_microseconds(infer, turn) for turn in range(count)]
    with marked(policy, marks):
        parts = list(_passes(infer, marks, count))
        device: list[list[tuple[str, float]]] = []
        if policy.placement.device.type == "cuda":
            marks.record = True
            device = [_on_device(marks) for _ in _passes(infer, marks, min(count, EVENTS))]
    low, middle, high = np.percentile(whole, (10, 50, 90)).tolist()
    return Line(frames, (low, middle, high), _parts(parts), _parts(device))


@contextmanager
def marked(policy: LoadedPolicy, marks: Marks) -> Iterator[None]:
    """Marks in every part of the policy's decisions, for as long as this is entered."""
    machine: Any = policy.runtime
    windows, tick, processor = machine._windows, machine._tick, policy.processor
    marks.stream = windows.stream
    with ExitStack() as undo:

        def around(owner: Any, name: str, before: str = "", after: str = "", event: str = "") -> None:
            undo.enter_context(_replaced(owner, name, _around(getattr(owner, name), marks, (before, after, event))))

        around(processor, "begin", after="images ready")
        around(processor, "complete", after="state, prompt, noise")
        around(machine, "decide_while", before="what is asked", after="outputs, timing")
        around(machine._sessions, "hold", before="hand-over to the device's thread", after="session", event="begun")
        around(windows, "_fill", before="compare")
        around(windows, "_copy", before="staged", after="upload call")
        around(windows, "stage", after="compare small inputs")
        around(machine._refresh, "due", after="what is due")
        around(windows, "upload", after="inputs are on their way", event="inputs on the device")
        names = machine._programs.names
        programs = [
            _around(run, marks, ("", f"replay call of {name}", f"end of {name}"))
            for name, run in zip(names, tick.programs, strict=True)
        ]
        undo.enter_context(_replaced(tick, "programs", programs))
        around(windows, "fetch", after="start of the read back", event="outputs on the host")
        for ask in ("call", "here"):
            around(machine._thread, ask, after="hand-over to the caller")
        around(windows, "wait", after="wait for the device")
        around(windows, "outputs", after="copy of the outputs")
        around(processor, "finish", after="finish")
        yield


def table(line: Line) -> str:
    """As Markdown."""
    low, middle, high = line.whole
    heading = f"frames of {line.frames}: whole call without marks {middle:.0f} us ({low:.0f} to {high:.0f}, p10 to p90)"
    text = [heading, "", *_rows("part of the host's time line", line.parts)]
    if line.device:
        text += ["", *_rows("the device's marks, from `begun` on", line.device)]
    return "\n".join(text)


def _rows(title: str, parts: Sequence[Part]) -> list[str]:
    rows = [f"| {title} | p10 us | p50 | p90 | ends at |", "|---|---|---|---|---|"]
    return rows + [f"| {p.name} | {p.p10:.1f} | {p.p50:.1f} | {p.p90:.1f} | {p.ends:.0f} |" for p in parts]


def _passes(infer: Infer, marks: Marks, count: int) -> Iterator[list[tuple[str, float]]]:
    """(part, microseconds since the call began) of each decision, in order."""
    for turn in range(count + WARM_UP):
        marks.clear()
        infer(turn)
        begin = marks.named[0][1]
        if turn >= WARM_UP:
            yield [(name, (at - begin) / 1e3) for name, at in marks.named]


def _on_device(marks: Marks) -> list[tuple[str, float]]:
    """(mark, microseconds since the call began) by the device's clock, and the host's end of the wait."""
    begin, first = marks.named[0][1], marks.events[0][1]
    offset = (marks.tied - begin) / 1e3
    found = [(name, offset + 1e3 * first.elapsed_time(event)) for name, event in marks.events]
    waited = next(at for name, at in marks.named if name == "wait for the device")
    return [*found, ("the host's wait ends", (waited - begin) / 1e3)]


def _parts(decisions: Sequence[Sequence[tuple[str, float]]]) -> tuple[Part, ...]:
    """Of the decisions that went the way most of them did; names that come again are numbered."""
    ways = [tuple(name for name, _ in one) for one in decisions]
    if not ways:
        return ()
    way = max(set(ways), key=ways.count)
    ends = np.array([[at for _, at in one] for one, its in zip(decisions, ways, strict=True) if its == way])
    spent = np.diff(ends, axis=1)
    names = [f"{name} {way[: at + 1].count(name)}" if way.count(name) > 1 else name for at, name in enumerate(way)]
    low, half, high = np.percentile(spent, (10, 50, 90), axis=0).tolist()
    middle = np.median(ends[:, 1:], axis=0).tolist()
    figures = zip(names[1:], low, half, high, middle, strict=True)
    return tuple(Part(*row) for row in figures)


def _around(call: Callable[..., Any], marks: Marks, names: tuple[str, str, str]) -> Callable[..., Any]:
    before, after, event = names

    def marking(*arguments: Any, **named: Any) -> Any:
        if before:
            marks.mark(before)
        result = call(*arguments, **named)
        if after:
            marks.mark(after)
        if event:
            marks.event(event)
        return result

    return marking


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an object, and puts back what was there, of the object's own or of its class."""
    own: Mapping[str, Any] = vars(owner)
    kept = {name: own[name]} if name in own else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(kept)


def _microseconds(call: Infer, turn: int) -> float:
    began = time.perf_counter_ns()
    call(turn)
    return (time.perf_counter_ns() - began) / 1e3
