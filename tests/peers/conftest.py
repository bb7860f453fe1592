"""Both sides of one tiny checkpoint: innerloop's policy and LeRobot's, on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import innerloop
from innerloop.engine import LoadedPolicy
from innerloop.measure.against.lerobot import LeRobotPolicy
from innerloop.measure.parity import ParityReport, compare
from recipes.tiny.make import Recipe, write

torch.set_num_threads(1)


@dataclass
class Sides:
    """One checkpoint, loaded twice."""

    directory: Path
    policy: LoadedPolicy
    official: LeRobotPolicy

    def compare(self, observation: dict, seed: int = 0) -> ParityReport:
        """Stage by stage, with noise from the seed."""
        return compare(self.policy, self.official, observation, self.noise(seed))

    def noise(self, seed: int) -> np.ndarray:
        """float32 [chunk, padded]."""
        shape = (self.official.config.chunk_size, self.official.config.max_action_dim)
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def observation(
        self, seed: int = 0, *, absent: str | None = None, prompt: str = "pick up the red block", reach: float = 0.7
    ) -> dict:
        """Frames of assorted sizes from the seed; `reach` scales the state, beyond 1 it leaves the statistics."""
        generator = np.random.default_rng(seed)
        sizes = [(240, 320), (57, 91), (56, 56), (480, 270)]
        images = {
            name: None if name == absent else generator.integers(0, 256, (*sizes[(seed + i) % 4], 3), dtype=np.uint8)
            for i, name in enumerate(self.official.cameras)
            if not name.startswith("empty_camera")
        }
        width = self.official.config.input_features["observation.state"].shape[0]
        state = (reach * generator.standard_normal(width)).astype(np.float32)
        return {"images": images, "state": state, "prompt": prompt}


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sides]:
    """A function (recipe, precision="fp32", official=None) -> Sides; each is made once."""
    directories: dict[Recipe, Path] = {}
    made: dict[tuple[Recipe, str, str | None], Sides] = {}

    def make(recipe: Recipe, precision: str = "fp32", official: str | None = None) -> Sides:
        key = (recipe, precision, official)
        if recipe not in directories:
            directories[recipe] = write(tmp_path_factory.mktemp(recipe.family), recipe)
        if key not in made:
            policy = innerloop.load(directories[recipe], device="cpu", precision=precision)
            made[key] = Sides(directories[recipe], policy, LeRobotPolicy(directories[recipe], dtype=official))
        return made[key]

    return make


def assert_parity(report: ParityReport) -> None:
    """What fp32 has to meet: discrete stages equal, images 1e-6, normalised actions 1e-4, robot units 1e-5 relative."""
    assert report.passed, report.text()
    for name in ("camera_mask", "tokens", "token_mask", "position_ids", "state"):
        assert report.stage(name).max_abs == 0.0, report.text()
    assert report.stage("images").max_abs <= 1e-6, report.text()
    assert report.stage("normalized").max_abs <= 1e-4, report.text()
    assert report.stage("actions").relative <= 1e-5, report.text()


@pytest.fixture(scope="session")
def agree() -> Callable[[ParityReport], None]:
    """assert_parity."""
    return assert_parity
