"""Renders the example frames: Meta-World's Sawyer arm picks up a block, seen by a table camera and a wrist camera.

Needs `pip install mujoco metaworld packaging pillow` and EGL. Run from the repository's root:
MUJOCO_GL=egl python -m recipes.frames.make examples/frames
"""

import argparse
import json
import warnings
from pathlib import Path

import metaworld
import mujoco
import numpy as np
from metaworld.policies import SawyerPickPlaceV3Policy
from PIL import Image

TASK = "pick-place-v3"
PROMPT = "pick up the red block and bring it to the blue target"
VIEWS = {"base": ("corner4", 2), "wrist": ("gripperPOV", 0)}  # Meta-World's camera and the quarter turns that right it
MOMENTS = (0, 25, 45, 70)  # control steps of 12.5 ms: above, at, lifting and carrying the block
HEIGHT, WIDTH = 240, 320


def main() -> None:
    """Runs Meta-World's scripted policy and writes <moment>-<view>.png and observations.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", module="metaworld")
    benchmark = metaworld.MT1(TASK, seed=0)
    env = benchmark.train_classes[TASK]()
    env.set_task(benchmark.train_tasks[0])
    observed, _ = env.reset()
    script = SawyerPickPlaceV3Policy()
    written = []
    with mujoco.Renderer(env.model, HEIGHT, WIDTH) as renderer:
        for step in range(max(MOMENTS) + 1):
            if step in MOMENTS:
                images = _render(renderer, env, directory, len(written))
                joints = [*env.data.qpos[:7], observed[3]]  # seven arm joints in radians, gripper opening in [0, 1]
                written.append({"images": images, "state": [round(float(x), 6) for x in joints], "prompt": PROMPT})
            observed = env.step(np.clip(script.get_action(observed), -1, 1))[0]
    (directory / "observations.json").write_text(json.dumps(written, indent=2) + "\n")


def _render(renderer: mujoco.Renderer, env: object, directory: Path, moment: int) -> dict[str, str]:
    names = {}
    for view, (camera, turns) in VIEWS.items():
        renderer.update_scene(env.data, camera=camera)
        names[view] = f"{moment}-{view}.png"
        Image.fromarray(np.rot90(renderer.render(), turns)).save(directory / names[view], optimize=True)
    return names


if __name__ == "__main__":
    main()
