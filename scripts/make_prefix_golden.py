"""Writes tests/golden/prefix.npz: what LeRobot's pi0.5 answers when it is given a prefix ("trained" real-time chunking).

LeRobot has it since its pull request 4056, that is after 0.6.1; the file in the repository was made by its commit 7427f31.
Run from the repository's root in an environment with such a LeRobot: python -m scripts.make_prefix_golden
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from innerloop.measure.against.lerobot import LeRobotPolicy, require

TINY = Path("examples/checkpoints/tiny-pi05")
GOLDEN = Path("tests/golden/prefix.npz")
CHUNK, LONGEST = 16, 12


def checkpoint(directory: Path) -> Path:
    """The shipped tiny pi0.5 with a longer chunk, as if it had been trained to be given up to LONGEST actions."""
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    path = directory / "config.json"
    path.chmod(0o644)
    changes = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "rtc_training_max_delay": LONGEST}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def case() -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """An observation, noise [CHUNK, 32], and what is left of a chunk, normalised [CHUNK, 7]."""
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ("base", "wrist")}
    observation = {"images": images, "state": rng.standard_normal(8).astype(np.float32), "prompt": "push the red block"}
    noise = rng.standard_normal((CHUNK, 32)).astype(np.float32)
    return observation, noise, rng.uniform(-1, 1, (CHUNK, 7)).astype(np.float32)


def main() -> None:
    """One normalised chunk a delay, [LONGEST + 1, CHUNK, 7]."""
    observation, noise, left = case()
    config = require("lerobot.policies.rtc.configuration_rtc").RTCConfig(
        enabled=True, mode="trained", execution_horizon=CHUNK
    )
    with tempfile.TemporaryDirectory() as directory:
        theirs = LeRobotPolicy(checkpoint(Path(directory)))
        with mock.patch.object(theirs.config, "rtc_config", config):
            theirs.policy.init_rtc_processor()
            chunks = [
                theirs._predict(
                    theirs._batch(observation),
                    noise,
                    inference_delay=delay,
                    prev_chunk_left_over=torch.from_numpy(left),
                )[0].numpy()
                for delay in range(LONGEST + 1)
            ]
    np.savez_compressed(GOLDEN, normalized=np.stack(chunks))


if __name__ == "__main__":
    main()
