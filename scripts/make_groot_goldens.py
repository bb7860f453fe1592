"""Writes tests/golden/groot.npz and groot.json: what LeRobot 0.6.1 computes on the tiny GR00T checkpoints, numbers alone.

Run from the repository's root, in an environment with LeRobot, diffusers and dm-tree: python -m scripts.make_groot_goldens
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from innerloop.measure.against.groot import LeRobotGroot
from innerloop.measure.against.lerobot import require
from recipes.tiny import groot, qwen

GOLDEN = Path("tests/golden/groot.npz")
DIGESTS = Path("tests/golden/groot.json")
EVERY = 4  # tokens whose features are kept
# Frames as cameras send them, height and width: shrunk, by a whole factor, by two, enlarged, and left alone.
FRAMES = ((480, 640), (720, 1280), (512, 512), (768, 1024), (120, 160), (256, 256), (300, 257), (1024, 768))


def trace(name: str, case: groot.Case) -> dict[str, np.ndarray]:
    """One case, as it is kept."""
    with tempfile.TemporaryDirectory() as place:
        official = LeRobotGroot(groot.write(Path(place), **case.settings), case.robot)
        seen = official.trace(groot.observation(case), groot.noise(case))
    seen["pixels"] = np.rint((seen["pixels"] + 1) * 127.5).astype(np.uint8)
    for kept in ("features", "refined"):
        seen[kept] = seen[kept][::EVERY]
    return {f"{name}.{stage}": value for stage, value in seen.items() if not stage.startswith("velocity.")}


def framed(height: int, width: int) -> str:
    """sha256 of the published checkpoints' picture of a frame: 256 pixels, cut to 95 %, cv2's area resize."""
    processing = require("lerobot.policies.groot.processor_groot")
    picture = processing._transform_n1_7_image_for_vlm_albumentations(
        qwen.picture(height, height, width),
        image_crop_size=[230, 230],
        image_target_size=[256, 256],
        shortest_image_edge=256,
        crop_fraction=0.95,
    )
    return hashlib.sha256(np.ascontiguousarray(picture).tobytes()).hexdigest()


def main() -> None:
    """Every case and every frame size."""
    torch.set_num_threads(1)
    kept: dict[str, np.ndarray] = {}
    for name, case in groot.CASES.items():
        kept |= trace(name, case)
    np.savez_compressed(GOLDEN, **kept)  # type: ignore[arg-type]
    digests = {f"{height}x{width}": framed(height, width) for height, width in FRAMES}
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
