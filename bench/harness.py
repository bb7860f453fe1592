"""Times one op inside a CUDA graph, on inputs rotated through more memory than the L2 holds."""

import argparse
import functools
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.case import Case, Inputs
from innerloop.kernels import launch
from innerloop.kernels.launch import Key, Launch
from innerloop.measure import provenance
from innerloop.measure.record import OperatorRow, OperatorsRecord

MAX_COPIES = 64
CALLS = 24  # least calls in a graph, so that the graph's own start is lost among them


@dataclass(frozen=True)
class Roof:
    """Measured here and now: bytes a second of a copy (read plus written), flop/s of a large bf16 product."""

    copy: float
    matrix: float


def measure_roof(device: torch.device) -> Roof:
    """A copy of 2 GB and an 8192 cubed product."""
    source = torch.ones(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / (time_graph([lambda: target.copy_(source)], calls=4) * 1e-6)
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    matrix = 2 * 8192**3 / (time_graph([lambda: torch.mm(left, right, out=product)], calls=8) * 1e-6)
    return Roof(copy, matrix)


def time_graph(calls_of: Sequence[Callable[[], object]], calls: int = CALLS, replays: int = 5) -> float:
    """Microseconds a call: the best replay of a graph that makes every call at least once, `calls` in all or more."""
    rounds = math.ceil(calls / len(calls_of))

    def every() -> None:
        for call in itertools.chain.from_iterable([calls_of] * rounds):
            call()

    replay = captured(every)
    replay()
    return min(elapsed(replay) for _ in range(replays)) / (rounds * len(calls_of))


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """A replay of `run`, which is called once before its graph is captured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = run()  # type: ignore[attr-defined]
    return graph.replay


def elapsed(replay: Callable[[], object]) -> float:
    """Microseconds of the device between what stood before a call and the end of what it started."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def rotated(case: Case, device: torch.device) -> list[Inputs]:
    """Copies of a case's inputs that together exceed twice the L2, 64 at most."""
    copies = min(MAX_COPIES, math.ceil(2 * launch.limits(device).l2_bytes / case.cost.bytes))
    return [case.make(device) for _ in range(max(2, copies))]


def time_case(case: Case, module: Any, inputs: Sequence[Inputs]) -> float:
    """Microseconds of one implementation (a module with the op's functions) on rotated inputs."""
    return time_graph([functools.partial(case.call, module, i) for i in inputs])


def launches_of(run: Callable[[], object], device: torch.device) -> dict[Key, list[Launch]]:
    """The candidates of every kernel that a call launches on a device, the preferred one first."""
    with launch.recorded() as used:
        run()
    return {key: launch.candidates(table, key[1], launch.limits(device)) for key, table in used.items()}


def row(case: Case, roof: Roof, microseconds: float, others: dict[str, float]) -> dict[str, Any]:
    """One flat record of an operator: time, rates, shares of the measured roof, and others' times."""
    seconds = microseconds * 1e-6
    floor = case.cost.microseconds(roof.copy, roof.matrix)
    return {
        "op": case.op,
        "case": case.label,
        "us": round(microseconds, 2),
        "gb_s": round(case.cost.bytes / seconds / 1e9),
        "tflops": round(case.cost.flops / seconds / 1e12, 1),
        "floor_us": round(floor, 2),
        "flops": case.cost.flops,
        "bytes": case.cost.bytes,
        "bound": "compute" if case.cost.flops / roof.matrix > case.cost.bytes / roof.copy else "bandwidth",
        "share_of_roof": round(floor / microseconds, 3),
        **{f"{name}_us": round(us, 2) for name, us in others.items()},
    }


def time_compiled(case: Case, inputs: Sequence[Inputs]) -> float:
    """Microseconds of the reference under torch.compile, all ops of the case as one graph."""
    torch.compiler.reset()  # a function compiled for too many shapes would go on uncompiled
    reference = case.reference()
    run = torch.compile(lambda *given: case.call(reference, given), dynamic=False, fullgraph=True)
    return time_graph([functools.partial(run, *given) for given in inputs])


def bench(cases: Sequence[Case], arguments: Sequence[str] | None = None) -> None:
    """Command line of one op's script: every case against torch eager and torch.compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    roof = measure_roof(device)
    rows = []
    for case in cases:
        inputs = rotated(case, device)
        error, _ = case.check(device)
        others = {"eager": time_case(case, case.reference(), inputs)}
        if not options.no_compile:
            others["compiled"] = time_compiled(case, inputs)
        rows.append({**row(case, roof, time_case(case, case.triton(), inputs), others), "error": error})
        print(line(rows[-1]), flush=True)
    if options.json:
        write(options.json, rows, roof)


def line(record: dict[str, Any]) -> str:
    """One row of the printed table."""
    others = "  ".join(f"{k.removesuffix('_us')} {record[k]:.1f}" for k in ("eager_us", "compiled_us") if k in record)
    return (
        f"{record['op']:<11}{record['case']:<34}{record['us']:>8.2f} us  {record['gb_s']:>5} GB/s "
        f"{record['tflops']:>6} TF/s  {100 * record['share_of_roof']:>3.0f}% of roof  {others}"
    )


def write(path: Path, rows: Sequence[dict[str, Any]], roof: Roof) -> None:
    """One record of kind `operators`. A row's `error` is its largest difference from the fp32 reference."""
    device = torch.device("cuda", torch.cuda.current_device())
    command = shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    OperatorsRecord(
        **provenance.machine(device, command, provenance.clocks(device)),
        ceilings={"copy_gb_s": roof.copy / 1e9, "matrix_bf16_tflops": roof.matrix / 1e12},
        rows=[_operator(one) for one in rows],
    ).save(path)


def _operator(one: dict[str, Any]) -> OperatorRow:
    return OperatorRow(
        operator=one["op"],
        shape=one["case"],
        us=one["us"],
        against_us={name.removesuffix("_us"): one[name] for name in ("eager_us", "compiled_us") if name in one},
        flops=one["flops"],
        bytes=one["bytes"],
        roof_percent=100 * one["share_of_roof"],
        bound=one["bound"],
        max_abs=one["error"],
    )
