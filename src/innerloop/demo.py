"""The shipped tiny checkpoint on the shipped camera frames, end to end, with a page to look at."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from innerloop import engine
from innerloop.contract import CheckpointError
from innerloop.measure import decision, plan_text

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


def main(output: Path, device: str | None, precision: str | None, out: Console) -> None:
    """Load, decide on every shipped observation, print actions, timing and receipt, write the plan's page."""
    if not EXAMPLES.is_dir():
        raise CheckpointError("the demo needs the repository's examples/ folder; clone the repository and run it there")
    out.print("loading examples/checkpoints/tiny-pi05 (pi0.5's architecture, random weights)")
    policy = engine.load(EXAMPLES / "checkpoints" / "tiny-pi05", device=device, precision=precision)
    out.print(str(policy.account), highlight=False)
    chunk = None
    for i, observation in enumerate(observations(EXAMPLES / "frames")):
        chunk = policy.infer(observation, seed=i)
        stages = ", ".join(chunk.receipt.stages if chunk.receipt else ())
        out.print(f"frame pair {i}: {chunk.timing['total']:.1f} ms, refreshed {stages}", highlight=False)
    if chunk is not None:
        out.print(decision.tables(chunk))
        again = policy.infer(observations(EXAMPLES / "frames")[-1], seed=99)
        out.print(
            f"same frames, new noise: {again.timing['total']:.1f} ms, refreshed "
            f"{', '.join(again.receipt.stages if again.receipt else ())}",
            highlight=False,
        )
    output.mkdir(parents=True, exist_ok=True)
    sketch = engine.sketch(EXAMPLES / "checkpoints" / "tiny-pi05", precision=policy.placement.precision)
    (output / "plan.html").write_text(plan_text.page(sketch.manifests[-1], sketch.details))
    out.print(f"the plan as a picture: {output / 'plan.html'}")
    policy.close()
