"""The shipped tiny pi0.5 checkpoint, the golden pi0 one, and observations for them."""

from pathlib import Path
from typing import Any

import numpy as np

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
