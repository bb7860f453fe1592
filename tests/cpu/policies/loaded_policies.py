"""The shipped tiny pi0.5 checkpoint, the golden pi0 one, and observations for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from innerloop.engine import LoadedPolicy

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINTS = {"pi05": ROOT / "examples/checkpoints/tiny-pi05", "pi0": ROOT / "tests/golden/tiny-pi0"}


def observe(policy: LoadedPolicy, seed: int, size: tuple[int, int] = (48, 64)) -> dict[str, Any]:
    """A made-up observation for a policy."""
    rng = np.random.default_rng(seed)
    return {
        "images": {name: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for name in policy.config.cameras},
        "state": rng.uniform(-1, 1, policy.processor.widths.state).astype(np.float32),
        "prompt": "pick up the red block",
    }


def course(policy: LoadedPolicy, observation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a first decision runs, in order: programs by name, and "text" where the host turns to state and prompt."""
    order: list[str] = []
    machine: Any = policy.runtime
    processor: Any = policy.processor
    complete, programs = processor.complete, machine._tick.programs
    names = [name.rpartition("/")[2] for name in machine._programs.names]
    noted = [lambda name=name, run=run: (order.append(name), run()) for name, run in zip(names, programs, strict=True)]
    monkeypatch.setattr(machine._tick, "programs", noted)
    monkeypatch.setattr(processor, "complete", lambda draft: (order.append("text"), complete(draft))[1])
    policy.infer(observation, seed=0, session="course")
    monkeypatch.undo()
    return order
