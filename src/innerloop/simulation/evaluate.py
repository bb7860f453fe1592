"""`innerloop eval`: success of a policy in simulation under one way of executing it, as a record."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.execute import Mode
from innerloop.measure import provenance
from innerloop.measure.record import SuccessRecord
from innerloop.simulation import episode
from innerloop.simulation.episode import Infer, Latency, Outcome
from innerloop.simulation.score import Paired, paired, wilson
from innerloop.simulation.world import RATE, TASKS, World

Said = Callable[[Outcome], None]


@dataclass(frozen=True)
class Setting:
    """One configuration. execute: actions from one observation to the next; None lets the mode choose."""

    tasks: tuple[str, ...] = tuple(TASKS)
    seeds: int = 20
    mode: Mode = "synchronous"
    execute: int | None = None
    latency: Latency = field(default_factory=Latency)

    @property
    def digest(self) -> str:
        """Names the episodes, not how they are executed: two settings with the same one can be compared."""
        episodes = {"tasks": " ".join(self.tasks), "seeds": np.arange(self.seeds)}
        return provenance.inputs_digest([episodes], [])


def outcomes(infer: Infer, setting: Setting, said: Said | None = None) -> list[Outcome]:
    """Every task with seeds 0 to setting.seeds - 1, in order; `said` hears of each episode."""
    found = []
    for task in setting.tasks:
        world, executor = World(task), episode.executor(setting.mode, setting.execute)
        for seed in range(setting.seeds):
            found.append(episode.run(world, infer, executor, seed, setting.latency))
            if said is not None:
                said(found[-1])
        world.close()
    return found


def record(
    policy: LoadedPolicy, engine: str, setting: Setting, found: Sequence[Outcome], command: str
) -> SuccessRecord:
    """The figures of one configuration and where they come from."""
    solved, by_task = sum(one.success for one in found), defaultdict(list)
    for one in found:
        by_task[one.task].append(one.success)
    low, high = wilson(solved, len(found))
    seams = [one.seam for one in found if one.seam is not None]
    placement, packages = policy.placement, [f"{name} {version(name)}" for name in ("mujoco", "metaworld")]
    clocks = provenance.clocks(placement.device)
    return SuccessRecord(
        **provenance.machine(placement.device, command, clocks),
        policy=policy.family.name,
        weights=policy.account.digest if policy.account else "random",
        dtype=str(placement.dtype).removeprefix("torch."),
        precision=placement.precision,
        fingerprint=policy.fingerprint,
        inputs=setting.digest,
        engine=engine,
        kernels=policy.kernels if engine == "innerloop" else engine,
        task=", ".join(setting.tasks),
        environment=", ".join(packages),
        episodes=len(found),
        successes=solved,
        success=solved / len(found),
        interval_low=low,
        interval_high=high,
        seeds=list(range(setting.seeds)),
        chunk=policy.config.chunk,
        horizon=min(setting.execute or policy.config.chunk, policy.config.chunk),
        steps=policy.config.steps,
        environments=1,
        mode=setting.mode,
        rate_hz=RATE,
        delay_ms=setting.latency.delay_ms,
        jitter_ms=setting.latency.jitter_ms,
        outcomes=dict(by_task),
        seam=float(np.median(seams)) if seams else -1.0,
        waited=sum(one.waited for one in found) / sum(one.ticks for one in found),
    )


def compare(mine: SuccessRecord, other: SuccessRecord) -> Paired:
    """Both records' episodes pair by pair. Raises InnerloopError unless tasks and seeds are the same."""
    if mine.inputs != other.inputs:
        raise InnerloopError(
            f"the records have different episodes ({mine.task}, {mine.episodes} episodes; {other.task}, "
            f"{other.episodes}): evaluate both on the same tasks and seeds"
        )
    return paired(_flat(mine.outcomes), _flat(other.outcomes))


def table(found: SuccessRecord) -> Table:
    """Success by task, and of all with its interval."""
    shown = Table(
        title=f"{found.mode}, {found.horizon} of {found.chunk} actions, {found.delay_ms:g} ms", title_justify="left"
    )
    for column in ("task", "success", "95 % interval"):
        shown.add_column(column)
    for task, results in found.outcomes.items():
        shown.add_row(task, f"{sum(results)} of {len(results)}", _span(*wilson(sum(results), len(results))))
    shown.add_section()
    shown.add_row("all", f"{found.successes} of {found.episodes}", _span(found.interval_low, found.interval_high))
    return shown


def official(checkpoint: Path, policy: LoadedPolicy) -> Infer:
    """LeRobot's own inference in place of ours; `policy` draws the noise and gives back robot units, as for ours."""
    from innerloop.contract import Chunk
    from innerloop.measure.against.lerobot import LeRobotPolicy

    dtype = "bfloat16" if policy.placement.precision == "bf16" else "float32"
    theirs = LeRobotPolicy(checkpoint, str(policy.placement.device), dtype)
    processor = policy.processor

    def infer(observation: Mapping[str, Any], *, seed: int, previous: Any = None) -> Chunk:
        started, noise = time.perf_counter(), processor.noise(seed=seed)
        if previous is None:
            narrow = theirs.infer(observation, noise)
        else:
            context = processor.prepare(observation).context
            left = processor.guidance(previous, context)["previous"][: len(previous.actions)]
            rows = {"delay": previous.delay, "horizon": len(left)}
            narrow = theirs.guided(observation, noise, left[:, : processor.widths.action], **rows)
        normalized = np.zeros(noise.shape, np.float32)
        normalized[:, : narrow.shape[1]] = narrow
        actions = processor.finish(normalized, processor.prepare(observation).context)
        return Chunk(actions, normalized, {"total": 1e3 * (time.perf_counter() - started)})

    return infer


def _flat(outcomes: Mapping[str, Sequence[bool]]) -> list[bool]:
    return [success for results in outcomes.values() for success in results]


def _span(low: float, high: float) -> str:
    return f"{low:.0%} to {high:.0%}"
