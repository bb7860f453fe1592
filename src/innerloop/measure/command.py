"""`innerloop bench` and `innerloop report`: options in, records and tables out."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import Kernels
from innerloop.measure import page, record, report, terminal
from innerloop.measure.batch import batch_curve
from innerloop.measure.bench import Run, bench, first, origin
from innerloop.measure.clock import Workload
from innerloop.measure.control import ControlLoop, control_record
from innerloop.measure.cost import CostRecorder
from innerloop.measure.ladder import Contender, Step, climb
from innerloop.measure.message import Message
from innerloop.measure.options import BenchOptions, parse_command
from innerloop.measure.profile import kernels_record
from innerloop.measure.record import LatencyRecord, Record, ServedRecord
from innerloop.measure.reproduce import differences, reproduced
from innerloop.measure.served import Client, ServedOptions, clock_served
from innerloop.measure.side_by_side import KNOWN, LEROBOT, TORCH_COMPILE, Bench
from innerloop.measure.subject import PolicySubject, make_workload
from innerloop.measure.trace import count_launches, write_trace

_RUNGS: tuple[tuple[str, Kernels], ...] = (
    ("captured, plain torch", "reference"),
    ("captured, one kernel an operator", "operators"),
    ("captured, fused kernels", "fused"),
)
_CPU_RUNGS: tuple[tuple[str, Kernels], ...] = (("engine, nothing captured", "reference"),)


def run_bench(options: BenchOptions, trace: Path | None = None) -> Iterator[Record]:
    """Everything that was asked for, each record as soon as it is there; the whole call always, and first.

    trace: also write a Chrome / Perfetto trace there.
    """
    made = Bench(options)
    if options.profile and made.placement.device.type != "cuda":
        raise InnerloopError("kernels are profiled on a GPU; on a CPU look at a trace (--trace FILE)")
    with closing(made.policy()) as policy, made.references() as others:
        subject = PolicySubject(policy, options.random_weights)
        if options.control:
            _loop(options, subject.facts.chunk, 1.0)  # a robot that cannot be is refused before anything is measured
        workload = _workload(policy, options)
        whole = bench(subject, workload, Run(options.command(), options.ticks), others)
        yield whole
        if trace is not None:
            write_trace(_next_call(subject.infer, workload), trace)
        fields = origin(subject, workload, options.command(), whole.clocks)
        sizes = {"views": whole.views, "prompt_tokens": whole.prompt_tokens, "chunk": whole.chunk, "steps": whole.steps}
        if options.profile:
            yield kernels_record(subject.kernel_events(first(subject, workload)), fields | sizes)
    del policy, subject, others  # their memory is needed below
    if options.control:
        yield control_record(_loop(options, whole.chunk, whole.p50_ms), fields)
    if options.batch:
        yield batch_curve(made.policy, options.batch, workload, options.ticks, fields | sizes)
    if options.ladder:
        steps = ladder_steps(made, workload)
        yield climb(steps, workload, options.ticks, whole.precision, fields | sizes | {"batch": whole.batch})


def bench_command(
    options: BenchOptions, out: Console, as_json: Path | None = None, trace: Path | None = None
) -> list[Record]:
    """Measure, print tables, write records: the first to `as_json`, others beside it with their kind in the name."""
    records: list[Record] = []
    for one in run_bench(options, trace):
        records.append(one)
        if as_json is not None:
            place = as_json if one is records[0] else as_json.with_name(f"{as_json.stem}-{one.kind}.json")
            one.save(place)
            out.print(f"wrote {place}", highlight=False)
    terminal.show(records, out)
    return records


def served_command(
    connect: Callable[[str], Client], options: ServedOptions, command: str, out: Console, as_json: Path | None = None
) -> ServedRecord:
    """Measure a served policy at its clients, print the table, write the record. `connect` opens a named session."""
    found = clock_served(connect, options, command)
    terminal.show([found], out)
    if as_json is not None:
        found.save(as_json)
        out.print(f"wrote {as_json}", highlight=False)
    return found


def reproduce_command(path: Path, out: Console, target: str | None = None) -> bool:
    """Run a record's command again, print what changed, and say whether p50 is within the record's own spread.

    target: where the checkpoint is now, for records that are not of random weights.
    """
    then = record.load(path)
    if not isinstance(then, LatencyRecord):
        raise InnerloopError(f"{path} is a {then.kind} record; reproduce one of a whole call")
    options = parse_command(then.command)
    if target is None and not options.random_weights and not Path(options.target).is_dir():
        raise InnerloopError(
            f"{path} is of the checkpoint '{options.target}': say where it is, innerloop bench CKPT --reproduce {path}"
        )
    if target is not None:
        options = replace(options, target=target)
    now = next(run_bench(replace(options, batch=(), ladder=False, control=False, profile=False)))
    assert isinstance(now, LatencyRecord)
    rows = differences(then, now)
    out.print(terminal.difference_table(rows))
    low, high = then.quantiles_ms["1"], then.quantiles_ms["99"]
    verdict = "within" if reproduced(rows) else "outside"
    out.print(f"p50 {now.p50_ms:.3f} ms is {verdict} the record's spread, {low:.3f} to {high:.3f} ms (1 % to 99 %)")
    return reproduced(rows)


def report_command(
    paths: Sequence[Path], out: Console, markdown: Path | None = None, html: Path | None = None
) -> list[Record]:
    """Read records and directories of them; print tables, or write them between a document's markers, or as a page."""
    files = sorted(file for path in paths for file in (path.glob("*.json") if path.is_dir() else [path]))
    if not files:
        raise InnerloopError("no records there; write some with innerloop bench --json FILE")
    records = [record.load(file) for file in files]
    if markdown is not None:
        report.write_between_markers(markdown, report.markdown(records))
        out.print(f"wrote {markdown}", highlight=False)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page.render(records))
        out.print(f"wrote {html}", highlight=False)
    if markdown is None and html is None:
        terminal.show(records, out)
    return records


def ladder_steps(made: Bench, workload: Workload) -> list[Step]:
    """From the official implementation to fused kernels in captured graphs; the others' rungs where they were asked for."""
    against, rungs = made.options.against, _RUNGS if made.placement.device.type == "cuda" else _CPU_RUNGS
    official = Step("official, eager", partial(_other, made, workload, LEROBOT))
    compiled = Step("plan, torch.compile a stage", partial(_other, made, workload, TORCH_COMPILE))
    return [
        *([official] if LEROBOT in against else []),
        Step("plan, eager, plain torch", partial(_ours, made, workload, "reference", captured=False)),
        *([compiled] if TORCH_COMPILE in against else []),
        *(Step(name, partial(_ours, made, workload, kernels, captured=True)) for name, kernels in rungs),
    ]


@contextmanager
def _other(made: Bench, workload: Workload, name: str) -> Iterator[Contender]:
    with KNOWN[name].open(made) as other:
        yield Contender(other.infer, lambda: _launches(other.infer, workload, made.placement.device.type))


@contextmanager
def _ours(made: Bench, workload: Workload, kernels: Kernels, captured: bool) -> Iterator[Contender]:
    policy = made.policy(kernels=kernels)
    subject = PolicySubject(policy)

    def interpreted(observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        prepared = subject.prepare(observation, noise)
        normalized = subject.interpret(prepared)
        policy.processor.finish(normalized, prepared.context)
        return normalized

    def replayed(observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        return subject.infer(observation, noise).normalized

    decide = replayed if captured else interpreted
    on_gpu = subject.device.type == "cuda"
    count = (
        (lambda: _launches(decide, workload, "cuda"))
        if on_gpu
        else (lambda: sum(subject.launches(first(subject, workload)).values()))
    )
    try:
        yield Contender(decide, count)
    finally:
        policy.close()


def _launches(decide: Callable[..., object], workload: Workload, device: str) -> int:
    run = _next_call(decide, workload)
    if device == "cuda":
        return count_launches(run)
    with torch.compiler.set_stance("force_eager"), CostRecorder() as recorder:  # operators, not what fused them
        run()
    operations: int = recorder.cost.operations
    return operations


def _next_call(decide: Callable[..., object], workload: Workload) -> Callable[[], object]:
    """Decides upon the next observation at each call, so that every stage is due."""
    pairs = itertools.cycle(zip(workload.observations, workload.noises, strict=True))
    return lambda: decide(*next(pairs))


def _workload(policy: LoadedPolicy, options: BenchOptions) -> Workload:
    """The default of prompt tokens is raised to the shortest prompt; more than the policy holds are refused."""
    tokens, longest = options.prompt_tokens, max(policy.plans)
    raised = tokens == BenchOptions.prompt_tokens
    if tokens > longest and not raised:
        raise InnerloopError(f"this policy holds prompts of up to {longest} tokens, not {tokens}; ask for fewer")
    return make_workload(policy, options.frame, tokens, Message(options.encoding), options.seed, raised=raised)


def _loop(options: BenchOptions, chunk: int, latency_ms: float) -> ControlLoop:
    return ControlLoop(
        chunk=chunk,
        horizon=chunk if options.horizon is None else options.horizon,
        control_hz=options.control_hz,
        environment_ms=options.environment_ms,
        delay_ms=options.delay_ms,
        latency_ms=latency_ms,
    )
