"""`innerloop eval`: options in; episodes, tables and a record out."""

from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from innerloop import engine
from innerloop.contract import InnerloopError
from innerloop.execute import MODES
from innerloop.measure import record
from innerloop.measure.record import SuccessRecord
from innerloop.simulation import display, evaluate
from innerloop.simulation.evaluate import Setting
from innerloop.simulation.world import TASKS

ENGINES = ("innerloop", "lerobot")


def run_eval(
    checkpoint: Path, setting: Setting, out: Console, *, by: str = "innerloop", command: str = "", **loading: Any
) -> SuccessRecord:
    """Every episode of the setting with its progress, then the table. by: who decides; loading: engine.load's options."""
    _check(setting, by)
    display.prepare()
    with closing(engine.load(checkpoint, **loading)) as policy:
        infer = policy.infer if by == "innerloop" else evaluate.official(checkpoint, policy)
        with Progress(console=out, transient=True) as progress:
            bar = progress.add_task("episodes", total=len(setting.tasks) * setting.seeds)
            found = evaluate.outcomes(infer, setting, lambda one: progress.advance(bar))
        result = evaluate.record(policy, by, setting, found, command)
    out.print(evaluate.table(result))
    return result


def compare(result: SuccessRecord, other: Path, out: Console) -> None:
    """Prints how the episodes of a record read from a file differ from these."""
    read = record.load(other)
    if not isinstance(read, SuccessRecord):
        raise InnerloopError(f"{other} is a record of kind {read.kind}; give one written by innerloop eval --json")
    pair = evaluate.compare(result, read)
    out.print(f"against {other.name} ({read.engine}, {read.precision}, {read.mode}): {pair.text}", highlight=False)


def _check(setting: Setting, by: str) -> None:
    if by not in ENGINES:
        raise InnerloopError(f"there is no engine {by!r}; choose of {', '.join(ENGINES)}")
    if setting.mode not in MODES:
        raise InnerloopError(f"there is no execution mode {setting.mode!r}; choose of {', '.join(MODES)}")
    unknown = [task for task in setting.tasks if task not in TASKS]
    if unknown or not setting.tasks:
        raise InnerloopError(f"there is no task {', '.join(unknown) or 'given'}; choose of {', '.join(TASKS)}")
    if setting.seeds < 1 or setting.latency.delay_ms < 0 or setting.latency.jitter_ms < 0:
        raise InnerloopError("seeds must be at least 1, delay and jitter at least 0 ms")
    if setting.execute is not None and setting.execute < 1:
        raise InnerloopError(f"execute is {setting.execute}; it counts the actions from one observation to the next")
