"""The shipped tiny checkpoint on the shipped camera frames, end to end, with a page to look at."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from innerloop import engine
from innerloop.contract import CheckpointError, Chunk
from innerloop.measure import decision, plan_text
from innerloop.measure.subject import SESSION, PolicySubject

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def observations(folder: Path) -> list[dict[str, Any]]:
    """The shipped frames as observations: images uint8 [240, 320, 3], state, prompt."""
    listed = json.loads((folder / "observations.json").read_text())
    return [
        {
            "images": {name: np.asarray(Image.open(folder / file)) for name, file in entry["images"].items()},
            "state": np.array(entry["state"], dtype=np.float32),
            "prompt": entry["prompt"],
        }
        for entry in listed
    ]


def _refreshed(chunk: Chunk) -> str:
    return f"{chunk.timing['total']:.1f} ms, refreshed {', '.join(chunk.receipt.stages if chunk.receipt else ())}"


def _stages(policy: engine.LoadedPolicy, observation: dict[str, Any]) -> Table:
    """Every stage's time in a decision of a new session, after one that warms up."""
    subject = PolicySubject(policy)
    prepared = subject.prepare(observation, policy.processor.noise(seed=0))
    for _ in range(2):
        policy.reset(SESSION)
        profiled = subject.profile(prepared)
    return plan_text.timed(policy.plans[prepared.capacity].manifest(), profiled.stages_ms)


def main(output: Path, device: str | None, precision: str | None, out: Console) -> None:
    """Load, decide on every shipped observation, print actions, receipt and stage table, write the plan's page."""
    if not EXAMPLES.is_dir():
        raise CheckpointError("the demo needs the repository's examples/ folder; clone the repository and run it there")
    out.print("loading examples/checkpoints/tiny-pi05 (pi0.5's architecture, random weights)")

    def say(line: str) -> None:
        out.print(line, highlight=False, markup=False)

    policy = engine.load(EXAMPLES / "checkpoints" / "tiny-pi05", device=device, precision=precision, announce=say)
    frames = observations(EXAMPLES / "frames")
    for i, observation in enumerate(frames):
        chunk = policy.infer(observation, seed=i)
        say(f"frame pair {i}: {_refreshed(chunk)}")
    say(f"same frames, new noise: {_refreshed(policy.infer(frames[-1], seed=99))}")
    out.print(decision.tables(chunk))
    out.print(_stages(policy, frames[0]))
    output.mkdir(parents=True, exist_ok=True)
    sketch = engine.sketch(EXAMPLES / "checkpoints" / "tiny-pi05", precision=policy.placement.precision)
    (output / "plan.html").write_text(plan_text.page(sketch.manifests[-1], sketch.details))
    out.print(f"the plan as a picture: {output / 'plan.html'}")
    policy.close()
