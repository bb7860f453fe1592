"""`innerloop tune`: launch choices tried inside the captured pipeline, kept in a file, never on the hot path."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import launch, use_kernels
from innerloop.measure.observations import Scene, make_observations
from innerloop.runtime.machine import Machine

FRAME = (224, 224)


def tune_command(policy: LoadedPolicy, prompt: str, ticks: int, file: Path | None, out: Console) -> list[launch.Tuned]:
    """Try every candidate launch of every kernel of a policy, one op at a time; keep what makes a decision faster.

    The results go to `file` (default: the user's cache, where loading finds them), keyed by device, versions and shape.
    """
    device = policy.placement.device
    if device.type != "cuda":
        raise InnerloopError(f"tuning needs a GPU; this policy runs on {device}")
    started = time.monotonic()
    tried = 0

    def measure() -> float:
        nonlocal tried
        tried += 1
        if tried % 10 == 0:
            out.print(f"  {tried} pipelines in {time.monotonic() - started:.0f} s", highlight=False)
        return milliseconds(policy, prompt, ticks)

    results = launch.tune(measure, device)
    place = file or launch.tuned_file()
    place.parent.mkdir(parents=True, exist_ok=True)
    launch.save(place, results, device)
    out.print(_table(results))
    out.print(f"{tried} pipelines tried, {len(results)} choices written to {place}", highlight=False)
    return results


def milliseconds(policy: LoadedPolicy, prompt: str, ticks: int) -> float:
    """Capture the policy's plans anew and time decisions that refresh everything: the median."""
    with use_kernels(policy.placement.kernels):
        machine = Machine(policy.plans, policy.placement.device)
    scene = Scene(policy.cameras, FRAME, policy.processor.widths.state)
    prepared = [policy.processor.prepare(o) for o in make_observations(scene, prompt, 4)]
    capacity = policy.capacity(prepared[0].context.prompt_tokens)
    taken = []
    for i in range(ticks + ticks // 4):
        inputs = {**prepared[i % 4].inputs, "noise": policy.processor.noise(seed=i)}
        begun = time.perf_counter()
        machine.decide("default", inputs, capacity)
        taken.append(1e3 * (time.perf_counter() - begun))
    machine.close()
    return float(np.median(taken[ticks // 4 :]))


def _table(results: list[launch.Tuned]) -> Table:
    table = Table(title="choices that won inside the pipeline", title_justify="left")
    for column in ("op", "shape", "launch", "ms before", "ms after"):
        table.add_column(column)
    for r in results:
        sizes = " ".join(f"{k}={v}" for k, v in r.launch.sizes)
        chosen = f"{r.launch.warps} warps, {r.launch.stages} stages {sizes}"
        table.add_row(r.op, "x".join(map(str, r.shape)), chosen, f"{r.before_ms:.3f}", f"{r.after_ms:.3f}")
    return table
