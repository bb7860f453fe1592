"""Writes examples/frames/metaworld-pi05: one observation of each task a moment into an episode.

Run from the repository's root with innerloop[sim]: python -m recipes.demo_policy.frames examples/frames/metaworld-pi05
"""

import argparse
import json
import warnings
from pathlib import Path

from PIL import Image

from innerloop.simulation import display
from innerloop.simulation.world import TASKS, World
from recipes.demo_policy.record import Expert


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    folder = parser.parse_args().directory
    folder.mkdir(parents=True, exist_ok=True)
    display.prepare()
    warnings.simplefilter("ignore")  # of Meta-World, about its own experts
    listed = []
    for number, task in enumerate(TASKS):
        world = World(task)
        world.reset(500 + number)
        expert = Expert(world)
        for _ in range(4 * number):
            world.step(expert.act())
        observation = world.observe()
        files = {name: f"{task}-{name}.png" for name in observation["images"]}
        for name, file in files.items():
            Image.fromarray(observation["images"][name]).save(folder / file, optimize=True)
        state = [round(float(value), 6) for value in observation["state"]]
        listed.append({"images": files, "state": state, "prompt": observation["prompt"]})
        world.close()
    (folder / "observations.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
