"""`innerloop eval`: options in; episodes, tables and a record out."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from innerloop import engine
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.execute import MODES
from innerloop.measure import record
from innerloop.measure.record import SuccessRecord
from innerloop.simulation import display, evaluate
from innerloop.simulation.episode import Infer, Latency, Outcome
from innerloop.simulation.evaluate import Setting
from innerloop.simulation.world import CAMERAS, TASKS, WIDTH

ENGINES = ("innerloop", "lerobot")
EXECUTE = 16  # actions from one observation to the next, where nothing else is asked for


def setting(tasks: Sequence[str], seeds: int, mode: str, execute: int | None, latency: Latency) -> Setting:
    """What is to be run: all tasks if none is named. Raises InnerloopError for what cannot be."""
    if mode not in MODES:
        raise InnerloopError(f"there is no execution mode {mode!r}; choose of {', '.join(MODES)}")
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise InnerloopError(f"there is no task {', '.join(unknown)}; choose of {', '.join(TASKS)}")
    if seeds < 1 or latency.delay_ms < 0 or latency.jitter_ms < 0:
        raise InnerloopError("--seeds must be at least 1, --delay-ms and --jitter-ms at least 0")
    if execute is not None and execute < 1:
        raise InnerloopError(f"--execute is {execute}; it counts the actions from one observation to the next")
    every = execute or (1 if mode == "ensemble" else EXECUTE)
    return Setting(tuple(tasks) or tuple(TASKS), seeds, mode, every, latency)


def run_eval(
    checkpoint: Path, asked: Setting, out: Console, *, by: str = "innerloop", command: str = "", **loading: Any
) -> SuccessRecord:
    """Every episode with its progress, then the table. by: who decides; loading: engine.load's options."""
    if by not in ENGINES:
        raise InnerloopError(f"there is no engine {by!r}; choose of {', '.join(ENGINES)}")
    if by == "lerobot" and asked.mode == "prefix":
        raise InnerloopError("LeRobot 0.6.1 cannot be given a prefix: use --mode realtime, or --by innerloop")
    found_display = display.prepare(lambda line: out.print(line, highlight=False))
    out.print(f"rendering through {found_display}", highlight=False)
    with closing(engine.load(checkpoint, **loading)) as policy:
        check_fits(policy)
        infer = policy.infer if by == "innerloop" else evaluate.official(checkpoint, policy)
        found = _episodes(infer, asked, out)
        result = evaluate.record(policy, by, asked, found, command)
    out.print(evaluate.table(result))
    out.print(_motion(result, found), highlight=False)
    return result


def check_fits(policy: LoadedPolicy) -> None:
    """Raises InnerloopError unless the policy was trained on these worlds."""
    known = policy.metadata
    found = (sorted(known["cameras"]), known["state_dim"], known["action_dim"])
    if found != (sorted(CAMERAS), WIDTH, WIDTH):
        raise InnerloopError(
            f"the checkpoint has cameras {', '.join(found[0])}, {found[1]} state values and {found[2]} actions; the "
            f"simulated tasks have {', '.join(CAMERAS)}, {WIDTH} and {WIDTH}: evaluate a policy trained on them, such "
            "as that of recipes/demo_policy"
        )


def same_episodes(path: Path, asked: Setting) -> SuccessRecord:
    """The record in a file. Raises InnerloopError unless it is one of these tasks and seeds."""
    read = record.load(path)
    if not isinstance(read, SuccessRecord):
        raise InnerloopError(f"{path} is a record of kind {read.kind}; give one written by innerloop eval --json")
    if read.inputs != asked.digest:
        raise InnerloopError(
            f"{path} has other episodes ({read.task}; {len(read.seeds)} seeds a task) than are asked for "
            f"({', '.join(asked.tasks)}; {asked.seeds} seeds): a comparison needs the same"
        )
    return read


def comparison(mine: SuccessRecord, other: SuccessRecord) -> str:
    """One line: the episodes of both pair by pair."""
    pair = evaluate.compare(mine, other)
    return f"against {other.engine}, {other.precision}, {other.mode}, {other.delay_ms:g} ms: {pair.text}"


def _episodes(infer: Infer, asked: Setting, out: Console) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    solved: Counter[str] = Counter()
    with Progress(*columns, console=out, transient=True) as progress:
        bar = progress.add_task(asked.tasks[0], total=len(asked.tasks) * asked.seeds)

        def said(one: Outcome) -> None:
            solved[one.task] += one.success
            progress.update(bar, advance=1, description=f"{one.task}: {solved[one.task]} of {one.seed + 1} solved")
            if one.seed + 1 == asked.seeds:
                out.print(f"{one.task}: {solved[one.task]} of {asked.seeds} solved", highlight=False)

        return evaluate.outcomes(infer, asked, said)


def _motion(result: SuccessRecord, found: Sequence[Outcome]) -> str:
    times = [each["total"] for one in found for each in one.timing]
    seam = "no chunk joined another" if result.seam < 0 else f"seam {result.seam:.2f}"
    return (
        f"{len(times)} decisions, {np.median(times):.1f} ms each (median, not part of the simulated latency); "
        f"{result.waited:.0%} of ticks without an action; {seam}"
    )
