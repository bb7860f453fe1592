"""A world that is one number a tick, and policies whose actions say which decision and which row they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np


class Counter:
    """Its state counts ticks; done after so many actions that were not holding still."""

    task, prompt = "count", "count"

    def __init__(self, length: int = 10_000) -> None:
        self.length, self.seen = length, []

    def reset(self, seed: int) -> None:
        self.ticks, self.moves, self.held = 0, 0, 0
        self.seen.append(seed)

    def step(self, action: np.ndarray) -> bool:
        self.ticks += 1
        self.moves += action[3] == 1.0
        return self.moves >= self.length

    def hold(self, last: np.ndarray) -> np.ndarray:
        self.held += 1
        return np.zeros(4, np.float32)

    def observe(self) -> dict[str, Any]:
        return {"tick": self.ticks}

    def close(self) -> None:
        pass


class Numbered:
    """Row i of decision n is (n, i, the tick it is meant for, 1); keeps what it was asked."""

    def __init__(self, chunk: int = 32) -> None:
        self.chunk, self.asked = chunk, []

    def infer(self, observation: dict[str, Any], *, seed: int, previous: Any = None) -> Any:
        number = len(self.asked)
        self.asked.append(SimpleNamespace(tick=observation["tick"], seed=seed, previous=previous))
        rows = np.arange(self.chunk, dtype=np.float32)
        ones = np.ones_like(rows)
        actions = np.stack([number * ones, rows, observation["tick"] + rows, ones], axis=1)
        return SimpleNamespace(actions=actions, timing={"total": 1.0})


class Seen(Counter):
    """A world for the tiny checkpoint: the first task's even seeds succeed after five ticks that have an action."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.random, self.solvable = np.random.default_rng(seed), self.task == "reach-v3" and seed % 2 == 0

    def step(self, action: np.ndarray) -> bool:
        self.ticks += 1
        return self.solvable and self.ticks - self.held >= 5

    def hold(self, last: np.ndarray) -> np.ndarray:
        self.held += 1
        return np.zeros_like(last)

    def observe(self) -> dict[str, Any]:
        images = {name: self.random.integers(0, 256, (16, 16, 3), np.uint8) for name in ("base", "wrist")}
        return {"images": images, "state": np.zeros(8, np.float32), "prompt": "reach"}

    def render(self, camera: str, size: int) -> np.ndarray:
        return self.random.integers(0, 256, (size, size, 3), np.uint8)
