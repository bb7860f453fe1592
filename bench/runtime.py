"""`python -m bench.runtime CHECKPOINT|FAMILY [--ticks 1000] [--json FILE]`: selective refresh and capsules.

What a decision costs by what has changed, against one graph of everything; what it costs to save, restore and fork a
session's state, and to go on after another session had the buffers. A family's name means full size, random weights.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import innerloop
from innerloop.contract import Plan, Stage
from innerloop.engine import LoadedPolicy
from innerloop.kernels import use_kernels
from innerloop.measure import provenance, report
from innerloop.measure.bench import origin
from innerloop.measure.clock import Prepared
from innerloop.measure.distribution import Distribution, within
from innerloop.measure.message import Message
from innerloop.measure.record import CapsulesRecord, Record, RefreshRecord, RefreshRow
from innerloop.measure.subject import PolicySubject, make_workload
from innerloop.policies import FAMILIES
from innerloop.runtime.capsule import Tier
from innerloop.runtime.machine import Decision, Machine

Asked = Callable[[int], Decision]
FRAMES = ("frames", "frame_sizes", "camera_mask")


class Questions:
    """Prepared decisions, alternating between two that differ in every input."""

    def __init__(self, policy: LoadedPolicy, prepared: Sequence[Prepared]) -> None:
        self.machine = policy.runtime
        self.capacity = max(one.capacity for one in prepared)
        self.all = [dict(one.inputs) for one in prepared]
        for at, inputs in enumerate(self.all):  # another prompt each time, whether or not the family writes state there
            tokens = np.array(inputs["tokens"])
            tokens[1] = 3 + at
            inputs["tokens"] = tokens

    def new(self, turn: int, *names: str) -> dict[str, Any]:
        """The first decision's inputs, with those named from another one."""
        other = self.all[1 + turn % (len(self.all) - 1)]
        return {name: other[name] if name in names else value for name, value in self.all[0].items()}

    def decide(self, session: str, inputs: dict[str, Any]) -> Decision:
        """One decision at the capacity that holds every prompt."""
        return self.machine.decide(session, inputs, self.capacity)


def refresh_rows(questions: Questions, policy: LoadedPolicy, ticks: int) -> list[RefreshRow]:
    """Milliseconds of the whole runtime call, by what changed."""
    everything = tuple(questions.all[0])
    cases: list[tuple[list[str], Asked]] = [
        (["everything"], lambda turn: questions.decide("r", questions.new(turn, *everything))),
        (["frames", "noise"], lambda turn: questions.decide("r", questions.new(turn, *FRAMES, "noise"))),
        (["prompt", "noise"], lambda turn: questions.decide("r", questions.new(turn, "tokens", "noise"))),
        (["noise"], lambda turn: questions.decide("r", questions.new(turn, "noise"))),
        (["noise, after another session"], partial(_after_another, questions)),
    ]
    rows = [_row(changed, ask, ticks) for changed, ask in cases]
    monolith = monolithic(policy, questions.capacity)
    once = lambda turn: monolith.decide("r", questions.new(turn, "noise"), questions.capacity)  # noqa: E731
    rows.append(_row(["noise, one graph of everything"], once, ticks))
    monolith.close()
    return rows


def monolithic(policy: LoadedPolicy, capacity: int) -> Machine:
    """The same plan as one stage, so as one graph: what a runtime without selective refresh replays."""
    plan = policy.plans[capacity]
    stages = [stage for stage in plan.stages if not stage.prepare]
    written = tuple(name for stage in stages for name in stage.writes)
    read = dict.fromkeys(name for stage in stages for name in stage.reads if name not in written)

    def run(buffers: Any) -> None:
        for stage in stages:
            stage.run(buffers)

    whole = Stage("everything", run, tuple(read), written)
    prepared = tuple(stage for stage in plan.stages if stage.prepare)
    with use_kernels(policy.placement.kernels):
        merged = Plan(f"{plan.name}-whole", plan.buffers, (*prepared, whole), plan.ticks, plan.fingerprint)
        return Machine({capacity: merged}, policy.placement.device)


def capsule_figures(questions: Questions, ticks: int) -> dict[str, Any]:
    """Fields of a CapsulesRecord. Device times are of the copies alone, whole calls are what the caller waits for."""
    machine = questions.machine
    session = machine.session("c")
    questions.decide("c", questions.all[0])
    capsule = session.snapshot()
    expected = questions.decide("c", questions.new(0, "noise")).outputs["actions"]

    def dirty(turn: int) -> None:
        questions.decide("c", questions.new(turn, *FRAMES))

    snapshot: dict[str, float] = {}
    restore: dict[str, float] = {}
    tiers: tuple[Tier, ...] = ("device", "host")
    for tier in tiers:
        take, back = partial(session.snapshot, tier), partial(session.restore, session.snapshot(tier))
        if tier == "device":
            snapshot["device, time on the device"] = _median(machine, dirty, take, ticks, on_device=True)
            restore["device, time on the device"] = _median(machine, dirty, back, ticks, on_device=True)
        snapshot[tier] = _median(machine, dirty, take, ticks)
        restore[tier] = _median(machine, dirty, back, ticks)
    snapshot["file"], restore["file"] = _file_times(questions, dirty, min(ticks, 20))
    snapshot["fork, time on the device"], restore["fork, time on the device"] = _fork_times(questions, dirty, ticks)
    session.restore(capsule, verify=True)
    again = questions.decide("c", questions.new(0, "noise")).outputs["actions"]
    return {
        "bytes": capsule.bytes,
        "ticks": ticks,
        "snapshot_ms": snapshot,
        "restore_ms": restore,
        "identical": bool(np.array_equal(expected, again)),
    }


def main() -> None:
    """Prints the times of getting ready and both tables; writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("--ticks", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--frame", type=int, default=224, help="side of a square frame, pixels")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="folder for the records")
    options = parser.parse_args()
    started = time.perf_counter()
    load = innerloop.random_policy if options.policy in FAMILIES else innerloop.load
    policy = load(options.policy, device=options.device)
    print(f"ready in {time.perf_counter() - started:.1f} s: {_seconds(policy)}")
    subject = PolicySubject(policy)
    frame = (options.frame, options.frame)
    workload = make_workload(policy, frame, options.prompt_tokens, Message("raw"), 0)
    pairs = zip(workload.observations, workload.noises, strict=True)
    questions = Questions(policy, [subject.prepare(*pair) for pair in pairs])
    rows = refresh_rows(questions, policy, options.ticks)
    figures = capsule_figures(questions, max(options.ticks // 10, 1))
    command = shlex.join(["python", "-m", "bench.runtime", *sys.argv[1:]])
    fields = origin(subject, workload, command, provenance.clocks(subject.device))
    refresh = RefreshRecord(**fields, ticks=options.ticks, rows=rows)
    capsules = CapsulesRecord(**fields, **figures)
    print(report.refresh_table([refresh]), report.capsules_table([capsules]), sep="\n\n")
    records: list[tuple[str, Record]] = [("refresh", refresh), ("capsules", capsules)]
    for name, record in records if options.json else ():
        record.save(options.json / f"{policy.family.name}-{name}.json")
    policy.close()


def _row(changed: list[str], ask: Asked, ticks: int) -> RefreshRow:
    print(f"  {', '.join(changed) or 'nothing'} new ...", flush=True)
    turns = iter(range(10**9))
    stages = list((ask(next(turns)), ask(next(turns)))[1].stages)

    def call() -> float:
        return ask(next(turns)).timing["run"]

    times = Distribution.of(within(call, ticks).samples)
    return RefreshRow(changed=changed, refreshed=stages, p50_ms=times.p50, p99_ms=times.p99)


def _after_another(questions: Questions, turn: int) -> Decision:
    questions.decide("other", questions.new(turn, *FRAMES, "tokens"))
    return questions.decide("r", questions.new(turn, "noise"))


def _median(
    machine: Machine, before: Callable[[int], None], call: Callable[[], object], ticks: int, on_device: bool = False
) -> float:
    """p50 milliseconds of a call, after `before` has changed the state."""
    samples = []
    for turn in range(ticks + 5):
        before(turn)
        if on_device and torch.cuda.is_available():
            samples.append(machine.on_device(partial(_event_time, call)))
        else:
            started = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - started))
    return float(np.median(samples[5:]))


def _event_time(call: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # the device is kept busy until all that follows is queued, so that the host's pace does not show
    torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def _file_times(questions: Questions, dirty: Callable[[int], None], ticks: int) -> tuple[float, float]:
    session = questions.machine.session("c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.capsule"
        save = _median(questions.machine, dirty, lambda: session.snapshot("host").save(path), ticks)
        load = _median(
            questions.machine, dirty, lambda: session.restore(questions.machine.load_capsule(path), verify=False), ticks
        )
    return save, load


def _fork_times(questions: Questions, dirty: Callable[[int], None], ticks: int) -> tuple[float, float]:
    """Forking a session whose state is new, and bringing another session to a capsule while it has the buffers."""
    machine = questions.machine
    session, capsule = machine.session("c"), machine.session("c").snapshot()

    def forget(turn: int) -> None:
        machine.session("twin").end()
        dirty(turn)

    fork = _median(machine, forget, lambda: session.fork("twin"), ticks, on_device=True)
    move = partial(machine.session("twin").restore, capsule)
    back = _median(machine, lambda turn: _use_twin(questions, turn), move, ticks, on_device=True)
    machine.session("twin").end()
    return fork, back


def _use_twin(questions: Questions, turn: int) -> None:
    questions.decide("twin", questions.new(turn, *FRAMES))


def _seconds(policy: LoadedPolicy) -> str:
    parts = {**policy.seconds, **{f"runtime {name}": s for name, s in policy.runtime.seconds.items()}}
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())


if __name__ == "__main__":
    main()
