"""The shipped policy in simulation, closed loop; where nothing can render, on recorded frames."""

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from innerloop import engine
from innerloop.contract import CheckpointError, InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.measure import decision, page, plan_text, plots, provenance
from innerloop.measure.control import ControlLoop, control_record
from innerloop.measure.record import ControlRecord, SuccessRecord
from innerloop.measure.subject import SESSION, PolicySubject
from innerloop.measure.svg import Bar, Segment, bar_chart
from innerloop.simulation import display, episode, evaluate
from innerloop.simulation.episode import Outcome
from innerloop.simulation.evaluate import Setting
from innerloop.simulation.film import Film
from innerloop.simulation.world import RATE, World

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAME = "metaworld-pi05"
EXECUTE = 16  # of 32 actions
SEEDS = 3  # episodes a task

Observation = dict[str, Any]


def main(
    output: Path,
    device: str | None,
    precision: str | None,
    out: Console,
    checkpoint: Path = EXAMPLES / "checkpoints" / NAME,
    frames: Path = EXAMPLES / "frames" / NAME,
) -> None:
    """Load, run every task a few times, print success, latency and verdict, write a film and a page."""
    if not checkpoint.is_dir():
        raise CheckpointError("the demo needs the repository's examples/ folder; clone the repository and run it there")

    def say(line: str) -> None:
        out.print(line, highlight=False, markup=False)

    say("loading a small pi0.5, trained on five Meta-World tasks")
    policy = engine.load(checkpoint, device=device, precision=precision, announce=say)
    output.mkdir(parents=True, exist_ok=True)
    try:
        say(f"rendering through {display.prepare(say)}")
    except InnerloopError as error:
        say(f"no simulation: {error}")
        _recorded(policy, recorded(frames), out)
    else:
        _simulated(policy, output, out)
    sketch = engine.sketch(checkpoint, precision=policy.placement.precision)
    (output / "plan.html").write_text(plan_text.page(sketch.manifests[-1], sketch.details))
    say(f"the plan as a picture: {output / 'plan.html'}")
    policy.close()


def _recorded(policy: LoadedPolicy, observations: Sequence[Observation], out: Console) -> None:
    out.print(f"{len(observations)} recorded observations instead", highlight=False)
    for seed, observation in enumerate(observations):
        chunk = policy.infer(observation, seed=seed)
        out.print(f"{observation['prompt']}: {chunk.timing['total']:.1f} ms", highlight=False)
    out.print(decision.tables(chunk))
    out.print(_stage_table(policy, stages(policy, observations)))


def _simulated(policy: LoadedPolicy, output: Path, out: Console) -> None:
    setting = Setting(seeds=SEEDS, execute=EXECUTE)
    film, begun = Film(), time.monotonic()
    found, observations = _episodes(policy, setting, film, out)
    success = evaluate.record(policy, "innerloop", setting, found, "innerloop demo")
    out.print(evaluate.table(success))
    times = stages(policy, observations)
    out.print(decision.tables(policy.infer(observations[-1], seed=0)))
    out.print(_stage_table(policy, times))
    verdict = _verdict(policy, found)
    out.print(page.control_words(verdict), highlight=False)
    film.save(output / "episodes.gif")
    picture = base64.b64encode((output / "episodes.gif").read_bytes()).decode()
    (output / "index.html").write_text(_page(success, verdict, times, picture))
    success.save(output / "success.json")
    out.print(f"{len(found)} episodes in {time.monotonic() - begun:.0f} s: {output / 'index.html'}", highlight=False)


def _episodes(
    policy: LoadedPolicy, setting: Setting, film: Film, out: Console
) -> tuple[list[Outcome], list[Observation]]:
    found, seen = [], []
    with Progress(console=out) as progress:
        bar = progress.add_task("episodes", total=len(setting.tasks) * setting.seeds)
        for task in setting.tasks:
            world, executor = World(task), episode.executor(setting.mode, setting.execute)
            film.start()
            for seed in range(setting.seeds):
                watch = film.watch if seed == 0 else None
                found.append(episode.run(world, policy.infer, executor, seed, setting.latency, watch))
                seen.append(world.observe())
                one = found[-1]
                progress.console.print(
                    f"{world.prompt}: {'done' if one.success else 'not done'} after {one.ticks / RATE:.1f} s, "
                    f"{one.decisions} decisions",
                    highlight=False,
                )
                progress.advance(bar)
            world.close()
    return found, seen


def stages(policy: LoadedPolicy, observations: Sequence[Observation]) -> dict[str, float]:
    """Median milliseconds of each device stage in a decision of a new session."""
    subject, rows = PolicySubject(policy), []
    for seed, observation in enumerate(observations):
        prepared = subject.prepare(observation, policy.processor.noise(seed=seed))
        policy.reset(SESSION)
        rows.append(subject.profile(prepared).stages_ms)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.median([row[name] for row in rows if name in row])) for name in names}


def _stage_table(policy: LoadedPolicy, times: dict[str, float]) -> Table:
    return plan_text.timed(policy.plans[max(policy.plans)].manifest(), times)


def recorded(folder: Path) -> list[Observation]:
    """The shipped frames as observations: images uint8 HWC, state, prompt."""
    listed = json.loads((folder / "observations.json").read_text())
    return [
        {
            "images": {name: np.asarray(Image.open(folder / file)) for name, file in entry["images"].items()},
            "state": np.array(entry["state"], dtype=np.float32),
            "prompt": entry["prompt"],
        }
        for entry in listed
    ]


def _verdict(policy: LoadedPolicy, found: Sequence[Outcome]) -> ControlRecord:
    latency = float(np.median([one["total"] for outcome in found for one in outcome.timing]))
    loop = ControlLoop(policy.config.chunk, EXECUTE, RATE, 0.0, 0.0, latency)
    placement, facts = policy.placement, PolicySubject(policy).facts
    origin = provenance.machine(placement.device, "innerloop demo", {})
    known = {name: getattr(facts, name) for name in ("policy", "weights", "dtype", "precision", "fingerprint")}
    return control_record(loop, {**origin, **known, "inputs": "simulation"})


def _page(success: SuccessRecord, verdict: ControlRecord, times: dict[str, float], picture: str) -> str:
    rates = [
        Bar(task, [Segment("solved", float(sum(results)), "s0")], f"{sum(results)} of {len(results)}")
        for task, results in success.outcomes.items()
    ]
    bars = [Bar(name, [Segment(name, ms, "s1")]) for name, ms in times.items()]
    span = f"{success.interval_low:.0%} to {success.interval_high:.0%}"
    cards = [
        page.card(f"{success.successes} of {success.episodes}", f"episodes solved (95 % interval {span})"),
        page.card(f"{verdict.latency_ms:.0f} ms", f"a decision, on {success.device}"),
        page.card(
            f"{verdict.overlapped_hz:.0f} Hz", f"actions attained of {verdict.control_hz:.0f} Hz: {verdict.bound}-bound"
        ),
    ]
    film = f'<img alt="one episode of each task" src="data:image/gif;base64,{picture}" style="width:100%">'
    words = "A small pi0.5 (8.8 million parameters) decides from two cameras, the hand's position and the instruction."
    return page.document(
        "innerloop demo",
        [
            "<h1>innerloop demo</h1>",
            f"<p>{words}</p>",
            f'<div class="cards">{"".join(cards)}</div>',
            page.figure("What it did", "The first episode of each task, at true speed.", film),
            page.figure("Success", "Episodes solved within five seconds.", bar_chart(rates, "episodes", "Success")),
            page.figure("A decision", "Median milliseconds of each stage.", bar_chart(bars, "ms", "Stages")),
            page.figure("Control time", page.control_words(verdict), plots.control(verdict)),
        ],
    )
