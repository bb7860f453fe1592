"""Steps become CUDA graphs that share one memory pool; each must replay what the interpreter computes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from innerloop.contract.buffer import Buffer, Role
from innerloop.contract.errors import PlanError
from innerloop.contract.plan import Plan
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import execute
from innerloop.runtime.queue import Queue
from innerloop.runtime.refresh import Refresh, Step
from innerloop.runtime.windows import Value, host_dtype, write_window

WARM_UPS = 2  # the first run compiles and tunes kernels, the second allocates what they settled on

# Replay against interpreter, relative to the largest magnitude of the buffer. Equal bits are expected; a library
# that picks another split of a product while capturing stays within these: 1e-5, and two roundings of 8-bit mantissas.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

Program = Callable[[], None]


@dataclass
class Programs:
    """How each step of a refresh table runs, by key; graphs by name on CUDA."""

    run: list[Program]
    names: list[str]
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each part of getting ready
    agreement: dict[str, float] = field(default_factory=dict)  # program -> largest difference from the interpreter


def eager(refresh: Refresh, plans: Sequence[Plan], arena: Arena, check: bool = False) -> Programs:
    """Steps that the interpreter runs."""
    return Programs([_eager(step, arena, check) for step in refresh.programs], program_names(refresh, plans))


def capture(
    refresh: Refresh, plans: Sequence[Plan], arena: Arena, samples: Sequence[Mapping[str, Value]] | None = None
) -> Programs:
    """Warms up, captures and checks every step of every plan, on the current stream (which must not be the default).

    samples: inputs of each plan to warm up and check with; else made up. Raises PlanError, naming the stage, when a
    replay differs from the interpreter by more than `BOUNDS`.
    """
    given = [made_up(plan) for plan in plans] if samples is None else samples
    programs = eager(refresh, plans, arena)
    clock = [time.perf_counter()]
    for steps, sample in zip(refresh.steps, given, strict=True):
        _write_all(arena, sample)
        for step in steps:
            for _ in range(WARM_UPS):
                programs.run[step.key]()
    torch.cuda.current_stream().synchronize()
    clock.append(time.perf_counter())
    pool, queue = torch.cuda.graph_pool_handle(), Queue(torch.cuda.current_stream())
    replays: list[Program] = []
    for name, run in zip(programs.names, programs.run, strict=True):
        programs.graphs[name] = _graph(run, pool)
        replays.append(queue.launcher(programs.graphs[name]))
    clock.append(time.perf_counter())
    for steps, sample in zip(refresh.steps, given, strict=True):
        _write_all(arena, sample)
        for step in steps:
            name = programs.names[step.key]
            programs.agreement[name] = _check(step, name, arena, programs.run[step.key], replays[step.key])
    clock.append(time.perf_counter())
    programs.run = replays
    programs.seconds = dict(zip(("warm-up", "capture", "self-check"), np.diff(clock).tolist(), strict=True))
    return programs


def made_up(plan: Plan) -> dict[str, np.ndarray]:
    """A fixed input: noise in floats and bytes, ones in integers (the smallest length, size and token that is valid)."""
    rng = np.random.default_rng(0)
    return {buffer.name: _made_up(buffer, rng) for buffer in plan.by_role(Role.INPUT)}


def program_names(refresh: Refresh, plans: Sequence[Plan]) -> list[str]:
    """A name for every program: its stages', after the plan's where the plans' differ."""
    used = [{step.key for step in steps} for steps in refresh.steps]
    names = []
    for step in refresh.programs:
        owners = [plan.name for plan, keys in zip(plans, used, strict=True) if step.key in keys]
        name = "+".join(step.names)
        names.append(name if len(owners) == len(plans) else f"{owners[0]}/{name}")
    return names


def difference(expected: torch.Tensor, actual: torch.Tensor) -> tuple[float, float]:
    """Largest absolute difference of two tensors of one dtype, and the bound it must keep; 0 for equal bits."""
    if torch.equal(expected.reshape(-1).view(torch.uint8), actual.reshape(-1).view(torch.uint8)):
        return 0.0, 0.0
    if not expected.is_floating_point():
        return float((expected.double() - actual.double()).abs().max()), 0.0
    largest = float(expected.double().abs().max())
    return float((expected.double() - actual.double()).abs().max()), BOUNDS[expected.dtype] * largest


def _eager(step: Step, arena: Arena, check: bool) -> Program:
    def run() -> None:
        for stage in step.stages:
            execute(stage, arena, check)

    return run


def _graph(run: Program, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads do on the device meanwhile is no fault of this capture
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run()
    return graph


def _check(step: Step, name: str, arena: Arena, interpret: Program, replay: Program) -> float:
    written = [buffer for stage in step.stages for buffer in stage.writes]
    kept = [buffer for buffer in written if not _overwritten(buffer, step, arena)]
    expected = _values_after(interpret, written, kept, arena)
    actual = _values_after(replay, written, kept, arena)
    worst = 0.0
    for buffer in kept:
        found, bound = difference(expected[buffer], actual[buffer])
        if not found <= bound:
            raise PlanError(
                f"stage '{name}': replay and interpreter differ by {found:.3g} in '{buffer}' (bound {bound:.3g}), so the "
                "policy is not ready: the stage keeps state, reads the host or draws random numbers; make those inputs"
            )
        worst = max(worst, found)
    return worst


def _overwritten(buffer: str, step: Step, arena: Arena) -> bool:
    """Whether a later stage of the step reuses the bytes of this buffer."""
    later = [name for stage in step.stages for name in stage.writes]
    return any(name in arena.layout.sharing(buffer) for name in later[later.index(buffer) + 1 :])


def _values_after(
    program: Program, written: Sequence[str], kept: Sequence[str], arena: Arena
) -> dict[str, torch.Tensor]:
    for name in written:
        arena.bytes_of(name).zero_()  # so that a program that writes nothing is found out
    program()
    return {name: arena.tensors[name].clone() for name in kept}


def _write_all(arena: Arena, sample: Mapping[str, Value]) -> None:
    for name, value in sample.items():
        write_window(arena, name, value)


def _made_up(buffer: Buffer, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(host_dtype(buffer))
    if dtype.kind == "f":
        return rng.standard_normal(buffer.shape).astype(dtype)
    if dtype == np.uint8:
        return rng.integers(0, 256, buffer.shape, dtype=np.uint8)
    return np.ones(buffer.shape, dtype)
