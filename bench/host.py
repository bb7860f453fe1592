"""`python -m bench.host [CHECKPOINT | FAMILY]`: microseconds of the host's part of a decision, by part.

The policy is real (frames, prompt, state, noise, chunk), but in place of its stages a thread spins, without the
interpreter's lock, where it would wait for a GPU. Copies are real: on CUDA from pinned memory, on a CPU from
memory to memory. On a CPU a family has its full sizes and no weights, which nothing here reads. Each part is timed
twice: in a loop of its own, and as in a decision, where frames and the wait have taken its place in the caches; the
latter is what a decision pays. On a GPU a time line of real decisions follows (bench.timeline).
"""

import argparse
import dataclasses
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import innerloop
from bench.frames import frame_table
from bench.timeline import Line, table, time_line
from innerloop.contract import Plan
from innerloop.engine import LoadedPolicy, RandomWeights, place
from innerloop.engine.assembly import dtypes_of, memory_plan, outline
from innerloop.measure import provenance
from innerloop.measure.clock import Prepared
from innerloop.measure.message import Message
from innerloop.measure.observations import frame_size
from innerloop.measure.subject import PolicySubject, make_workload
from innerloop.policies import FAMILIES
from innerloop.runtime.arena import Arena
from innerloop.runtime.capture import Programs, eager
from innerloop.runtime.machine import Machine
from innerloop.runtime.refresh import CHANGED, Refresh
from innerloop.runtime.tick import Tick
from innerloop.runtime.windows import Value, Windows

CHECKPOINT = Path(__file__).parents[1] / "examples/checkpoints/tiny-pi05"
SQUARE = ("224x224",)  # frames of a time line beside those asked for
WARM_UP = 20
PAUSE = 0.3  # ms of the wait before a part is timed as in a decision
Call = Callable[[int], object]


class Spin:
    """Keeps a processor busy for about so many milliseconds, without the interpreter's lock; `spent` is how long."""

    def __init__(self, milliseconds: float) -> None:
        self.spent = 0.0  # seconds
        self._rounds = 20_000
        self()
        self._rounds = max(int(self._rounds * 1e-3 * milliseconds / self.spent), 1)

    def __call__(self) -> None:
        began = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"spin", b"spin", self._rounds)
        self.spent = time.perf_counter() - began


class Pretended:
    """A device that is done so many milliseconds after its first program was started, by a spin of the one who waits."""

    def __init__(self, milliseconds: float) -> None:
        self.seconds = 1e-3 * milliseconds
        self.real: torch.cuda.Event | None = None  # at the end of the copies, where there is a device
        self._until = 0.0
        self._idle = True

    def start(self) -> None:
        """In place of every program."""
        if self._idle:
            self._idle, self._until = False, time.perf_counter() + self.seconds

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """As an event does."""
        if self.real is not None:
            self.real.record(stream)

    def synchronize(self) -> None:
        """As an event does."""
        if self.real is not None:
            self.real.synchronize()
        while time.perf_counter() < self._until:
            hashlib.pbkdf2_hmac("sha256", b"spin", b"spin", 20)
        self._idle = True


class IdleMachine(Machine):
    """A machine with a pretended device."""

    def __init__(self, plans: Mapping[int, Plan], device: torch.device, pretended: Pretended) -> None:
        self._pretended = pretended
        super().__init__(plans, device, capture=False)

    def _program(self, captured: bool, samples: Mapping[int, Mapping[str, Value]] | None) -> Programs:
        programs = eager(self._refresh, self._list, self._arena)
        programs.run[:] = [self._pretended.start] * len(programs.run)
        vars(programs)["graphs"] = dict.fromkeys(programs.names)  # so that decisions run where those of graphs do
        self._pretended.real = self._windows._done
        vars(self._windows)["_done"] = self._pretended
        return programs


class Parts:
    """The runtime's part of one decision, cut where the work changes its kind; the device's copies are waited for."""

    def __init__(self, policy: LoadedPolicy, prepared: Sequence[Prepared]) -> None:
        plans: list[Plan] = list(policy.plans.values())
        arena = Arena(plans, policy.placement.device)
        self.refresh = Refresh(plans, arena.layout, merge=True, prepared=False)
        self.windows = Windows(arena, self.refresh)
        self.tick = Tick(self.refresh, self.windows, [_nothing] * len(self.refresh.programs))
        self.steps = self.refresh.steps[list(policy.plans).index(prepared[0].capacity)]
        self.ledger, self.kept = self.refresh.ledger(), self.windows.nothing()
        self.inputs = [one.inputs for one in prepared]

    def stage(self, turn: int) -> None:
        """Compares new inputs and copies them to staging memory; frames also on to the device."""
        for given in self.windows.look(self.inputs[turn % len(self.inputs)], self.refresh.first_inputs):
            self.windows.stage(given, self.ledger, self.kept)
        self._waited()

    def upload(self, turn: int) -> None:
        """What is due, and the copy of the small inputs."""
        self.windows.upload(self.refresh.due(self.steps, self.ledger), self.ledger, self.kept)
        self._waited()

    def replay(self, turn: int) -> None:
        """The loop over what is due, without the device."""
        self.tick.replay([(step, CHANGED) for step in self.steps], self.ledger)

    def fetch(self, turn: int) -> None:
        """Copies the outputs back."""
        self.windows.fetch()
        self.windows.wait()
        self.windows.outputs()

    def _waited(self) -> None:
        self.windows.mark()
        self.windows.wait()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: a policy and observations, as arrays and as messages."""

    policy: LoadedPolicy
    seen: Sequence[Mapping[str, Any]]
    noises: Sequence[np.ndarray]
    prepared: Sequence[Prepared]
    messages: Mapping[str, Sequence[bytes]]

    @classmethod
    def of(cls, policy: LoadedPolicy, frame: tuple[int, int], tokens: int) -> "Case":
        """Observations of a frame size and a prompt length."""
        subject = PolicySubject(policy)
        load = make_workload(policy, frame, tokens, Message("raw"), 0)
        prepared = [subject.prepare(*pair) for pair in zip(load.observations, load.noises, strict=True)]
        messages = {name: [Message(name).pack(one) for one in load.observations] for name in ("raw", "jpeg")}
        return cls(policy, load.observations, load.noises, prepared, messages)

    def receive(self, encoding: str, turn: int) -> dict[str, Any]:
        """A message's observation."""
        return Message(encoding).unpack(self.messages[encoding][turn % len(self.seen)])

    def moved(self, turn: int) -> dict[str, Any]:
        """An observation whose state was never seen, so that its prompt, where the state is in it, is new."""
        state = np.array(self.seen[turn % len(self.seen)]["state"])
        state[:2] = np.cos(turn * 0.37), np.sin(turn * 0.11)
        return {**self.seen[turn % len(self.seen)], "state": state}


def parts(case: Case) -> dict[str, Call]:
    """Every part of a decision on the host, by name."""
    policy, runtime = case.policy, Parts(case.policy, case.prepared)
    processor, count = policy.processor, len(case.seen)
    chunk = np.zeros((processor.widths.chunk, processor.widths.max_action), np.float32)
    return {
        "receive, raw frames": lambda turn: case.receive("raw", turn),
        "receive, JPEG frames": lambda turn: case.receive("jpeg", turn),
        "prepare": lambda turn: processor.prepare(case.seen[turn % count]),
        "prepare, another state in the prompt": lambda turn: processor.prepare(case.moved(turn)),
        "noise, given": lambda turn: processor.noise(case.noises[turn % count]),
        "noise, from a seed": lambda turn: processor.noise(seed=turn),
        "noise, fresh": lambda turn: processor.noise(),
        "hand-over to the device's thread and back": lambda turn: policy.runtime.on_device(_nothing),
        "compare and stage; frames to the device": runtime.stage,
        "what is due; small inputs to the device": runtime.upload,
        "replay calls": runtime.replay,
        "outputs to the host": runtime.fetch,
        "finish": lambda turn: processor.finish(chunk, case.prepared[turn % count].context),
    }


def time_parts(calls: Mapping[str, Call], pause: Callable[[], None], count: int) -> dict[str, tuple[float, ...]]:
    """Microseconds of each part: in a loop, and after a pause each time (p10, p50, p90)."""
    loop = {name: [_microseconds(call, turn) for turn in range(count)] for name, call in calls.items()}
    cold: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(count + WARM_UP):  # in turns, so that a noisy moment is noisy for all
        for name, call in calls.items():
            pause()
            cold[name].append(_microseconds(call, turn))
    return {
        name: (float(np.median(loop[name])), *np.percentile(cold[name][WARM_UP:], (10, 50, 90)).tolist())
        for name in calls
    }


def whole_calls(case: Case, milliseconds: float, count: int) -> dict[str, list[float]]:
    """Microseconds of whole calls, from the message to the chunk, less the time that the pretended device takes."""
    idle = IdleMachine(case.policy.plans, case.policy.placement.device, Pretended(milliseconds))
    policy = dataclasses.replace(case.policy, runtime=idle)
    taken: dict[str, list[float]] = {encoding: [] for encoding in case.messages}

    def call(encoding: str, turn: int) -> None:
        state = case.moved(turn)["state"]
        began = time.perf_counter()
        policy.infer({**case.receive(encoding, turn), "state": state}, noise=case.noises[turn % len(case.noises)])
        taken[encoding].append(1e6 * (time.perf_counter() - began) - 1e3 * milliseconds)

    for turn in range(count + WARM_UP):
        for encoding in case.messages:
            call(encoding, turn)
    policy.runtime.close()
    return {encoding: times[WARM_UP:] for encoding, times in taken.items()}


def rinsing(case: Case) -> Callable[[], None]:
    """What a decision does to the caches: frames pass through them, and a wait."""
    rinse, spin = np.zeros((2, *next(iter(case.seen[0]["images"].values())).shape), np.uint8), Spin(PAUSE)

    def pause() -> None:
        rinse[:] = rinse[::-1]
        spin()

    return pause


def report(case: Case, milliseconds: float, count: int) -> str:
    """Both tables, as Markdown."""
    pause = rinsing(case)
    lines = ["| part | in a loop, us | as in a decision: p10 | p50 | p90 |", "|---|---|---|---|---|"]
    for name, figures in time_parts(parts(case), pause, count).items():
        lines.append(f"| {name} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")
    lines += [
        "",
        f"| whole call less {milliseconds:g} ms of device, us | p10 | p50 | p90 | share |",
        "|---|---|---|---|---|",
    ]
    for encoding, times in whole_calls(case, milliseconds, count).items():
        low, middle, high = np.percentile(times, (10, 50, 90))
        share = middle / (middle + 1e3 * milliseconds)
        lines.append(f"| {encoding} frames | {low:.0f} | {middle:.0f} | {high:.0f} | {share:.1%} |")
    return "\n".join(lines)


def hollow(name: str, cameras: int, chunk: int) -> LoadedPolicy:
    """A family at its full size without weights, on the CPU: everything but its stages is there."""
    family, placement = FAMILIES[name], place("cpu", "bf16", 1, "reference")
    config = family.default(cameras, chunk, 4)
    model = outline(family, config, RandomWeights(0))
    plans = _idle(family.plans(model, 1, placement.dtype, ""))
    memory = memory_plan(model, dtypes_of(model, family, placement.dtype), next(iter(plans.values())))
    machine = IdleMachine(plans, placement.device, Pretended(0.0))
    return LoadedPolicy(
        family, config, placement, model, family.synthetic(config), machine, None, memory, "", packed=False, tuned=0
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", nargs="?", default=str(CHECKPOINT), help="a checkpoint, or a family at full size")
    parser.add_argument("--frames", default="640x480")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--device-ms", type=float, default=9.0, help="how long the pretended device takes")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--cameras", type=int, default=2, help="of a family")
    parser.add_argument("--chunk", type=int, default=10, help="of a family")
    parser.add_argument("--device", nargs="?", const="cuda", help="without a name: cuda")
    parser.add_argument("--decisions", type=int, default=300, help="of each time line of real decisions, on a GPU")
    parser.add_argument("--json", "--out", type=Path, help="file for the time lines")
    options = parser.parse_args()
    policy = _policy(options)
    lines = []
    size = frame_size(options.frames)
    for frames in dict.fromkeys((options.frames, *SQUARE)) if policy.placement.device.type == "cuda" else ():
        lines.append(time_line(policy, frames, options.prompt_tokens, options.decisions))
        print(table(lines[-1]), end="\n\n", flush=True)
    if options.json is not None:
        options.json.write_text(_plain(policy, lines))
    case = Case.of(policy, size, options.prompt_tokens)
    where = f"{policy.placement.device}, torch {torch.__version__}"
    print(f"{policy.family.name} on {where}, {len(case.seen[0]['images'])} frames of {options.frames}\n")
    print(report(case, options.device_ms, options.count))
    print()
    print(frame_table(policy, size, len(case.seen[0]["images"]), rinsing(case)))
    policy.close()


def _plain(policy: LoadedPolicy, lines: Sequence[Line]) -> str:
    command = shlex.join(["python", "-m", "bench.host", *sys.argv[1:]])
    software = dict(provenance.software(command))
    where = {"policy": policy.family.name, "device": str(policy.placement.device), **software}
    return json.dumps({**where, "lines": [line.plain() for line in lines]}, indent=2) + "\n"


def _idle(plans: Mapping[int, Plan]) -> dict[int, Plan]:
    """The same with stages that do nothing; those that plans share stay shared."""
    idle = {
        id(stage): dataclasses.replace(stage, run=lambda buffers: None)
        for plan in plans.values()
        for stage in plan.stages
    }
    return {
        capacity: dataclasses.replace(plan, stages=tuple(idle[id(stage)] for stage in plan.stages))
        for capacity, plan in plans.items()
    }


def _policy(options: argparse.Namespace) -> LoadedPolicy:
    if options.policy not in FAMILIES:
        return innerloop.load(options.policy, device=options.device)
    if place(options.device, None, 1, "fused").device.type == "cpu":
        return hollow(options.policy, options.cameras, options.chunk)
    sizes = {"cameras": options.cameras, "chunk": options.chunk}
    return innerloop.random_policy(options.policy, device=options.device, **sizes)


def _microseconds(call: Call, turn: int) -> float:
    began = time.perf_counter_ns()
    call(turn)
    return (time.perf_counter_ns() - began) / 1e3


def _nothing() -> None:
    return


if __name__ == "__main__":
    main()
