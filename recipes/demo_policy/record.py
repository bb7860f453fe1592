"""Records scripted experts: observations along disturbed episodes, each with the chunk the expert would do from there.

Run from the repository's root with innerloop[sim]: python -m recipes.demo_policy.record reach-v3 --episodes 150
Writes recipes/demo_policy/data/<task>-<first seed>.npz.
"""

import argparse
import io
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from innerloop.simulation import display
from innerloop.simulation.world import CAMERAS, TASKS, World, require

CHUNK = 32
FIRST_SEED = 100_000  # evaluation uses small seeds
DATA = Path(__file__).parent / "data"
_LIMIT = 130  # actions an episode
_AFTER = 10  # actions recorded past success


class Expert:
    """Meta-World's scripted policy, and the chunk it would do from where the world is."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = require("metaworld.policies").ENV_POLICY_MAP[world.task]()

    def act(self) -> np.ndarray:
        """float32 [4] in -1..1."""
        return np.clip(self.policy.get_action(self.world.values), -1.0, 1.0).astype(np.float32)

    def chunk(self) -> np.ndarray:
        """float32 [CHUNK, 4]: the undisturbed expert from here on; the world is put back afterwards."""
        world, mujoco = self.world, self.world._mujoco
        env = world.environment
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        saved = np.empty(mujoco.mj_stateSize(env.model, kind))
        mujoco.mj_getState(env.model, env.data, saved, kind)
        kept = (world.values, env._prev_obs, env.curr_path_length)
        actions = []
        for _ in range(CHUNK):
            actions.append(self.act())
            world.step(actions[-1])
        mujoco.mj_setState(env.model, env.data, saved, kind)
        mujoco.mj_forward(env.model, env.data)
        world.mark()
        world.values, env._prev_obs, env.curr_path_length = kept
        return np.stack(actions)


class Disturbance:
    """Smooth noise on the hand all the time, and now and then a push in one direction for a few actions."""

    def __init__(self, generator: np.random.Generator, strength: float) -> None:
        self.generator, self.noise, self.push, self.left = generator, np.zeros(3), np.zeros(3), 0
        self.strength, self.scale = strength, strength * generator.choice([0.0, 0.1, 0.3])

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """The disturbed action."""
        self.noise = 0.8 * self.noise + 0.6 * self.scale * self.generator.standard_normal(3)
        if self.left == 0 and self.generator.random() < 0.05 * self.strength:
            self.left, self.push = int(self.generator.integers(3, 9)), 1.5 * self.generator.standard_normal(3)
        self.left = max(0, self.left - 1)
        offset = self.noise + (self.push if self.left else 0.0)
        return np.clip(action + np.append(offset, 0.0), -1.0, 1.0).astype(np.float32)


def episode(world: World, seed: int, every: int) -> list[tuple[bytes, np.ndarray, np.ndarray]]:
    """(both cameras as one WebP, state, chunk) at the start and about each `every` actions."""
    generator = np.random.default_rng(seed)
    world.reset(seed)
    disturb = Disturbance(generator, 0.3 if world.task == "push-v3" else 1.0)  # a pushed hand loses the puck
    expert, samples, done = Expert(world), [], None
    due = 0
    for step in range(_LIMIT):
        if step == due:
            samples.append((picture(world), world.state, expert.chunk()))
            due += int(generator.integers(every // 2, every + every // 2 + 1))
        if world.step(disturb(expert.act())) and done is None:
            done = step
        if done is not None and step > done + _AFTER:
            break
    return samples if done is not None else []


def picture(world: World) -> bytes:
    """The cameras side by side."""
    file = io.BytesIO()
    frames = [world.render(name) for name in CAMERAS]
    Image.fromarray(np.concatenate(frames, axis=1)).save(file, "WEBP", quality=80, method=4)
    return file.getvalue()


def write(path: Path, task: str, samples: list[tuple[bytes, np.ndarray, np.ndarray]]) -> None:
    """One compact file a task."""
    pictures = [np.frombuffer(sample[0], dtype=np.uint8) for sample in samples]
    columns: dict[str, Any] = {
        "pictures": np.concatenate(pictures),
        "ends": np.cumsum([len(each) for each in pictures]),
        "states": np.stack([sample[1] for sample in samples]),
        "chunks": np.stack([sample[2] for sample in samples]).astype(np.float16),
        "prompt": np.array(TASKS[task]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path.with_suffix(".part.npz"), **columns)
    path.with_suffix(".part.npz").rename(path)


def main() -> None:
    """Command line of the recipe's first half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--episodes", type=int, default=150)
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first episode; part of the file's name")
    parser.add_argument("--every", type=int, default=6, help="actions between two samples, about")
    arguments = parser.parse_args()
    display.prepare()
    warnings.simplefilter("ignore")  # of Meta-World, about its own experts
    world, samples, failed, start = World(arguments.task), [], 0, time.monotonic()
    for number in range(arguments.episodes):
        found = episode(world, arguments.seed + number, arguments.every)
        samples += found
        failed += not found
        if number % 10 == 9 or number == arguments.episodes - 1:
            size = sum(len(sample[0]) for sample in samples) / 1e6
            print(
                f"{number + 1} episodes, {failed} failed, {len(samples)} samples, {size:.1f} MB, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            write(DATA / f"{arguments.task}-{arguments.seed}.npz", arguments.task, samples)
    world.close()


if __name__ == "__main__":
    main()
