"""Seam and waiting by execution mode and delay, on a toy: `python -m bench.seams` prints the table of docs/execution.md.

A point moves forward by one a tick and sideways by a slope that every decision draws anew, as a policy does that knows
several ways. The policy is the exact flow of that distribution, so guidance bends whole plans, as in a trained policy; and
of that distribution given a prefix, as in one trained so.
"""

from typing import Any

import numpy as np

from innerloop.blocks.flow import gains
from innerloop.contract import Chunk, Previous
from innerloop.execute import MODES
from innerloop.process.guidance import given, weights
from innerloop.simulation import episode
from innerloop.simulation.episode import Latency, Outcome
from innerloop.simulation.world import RATE

CHUNK, EXECUTE, STEPS, SEEDS = 32, 16, 5, 10
DELAYS = (0, 4, 8, 12)  # control ticks
SPREAD = 0.5  # standard deviation of the slope
UNIT = 16.0  # forward steps that are 1 in normalised units


class Point:
    """The world: a position float [4] that is wherever the last action was."""

    task = prompt = "ramp"

    def reset(self, seed: int) -> None:
        """At the origin."""
        self.position, self.largest = np.zeros(4, np.float32), 0.0

    def step(self, action: np.ndarray) -> bool:
        """Never done."""
        self.largest = max(self.largest, float(np.abs(action - self.position).max()))
        self.position = action
        return False

    def hold(self, last: np.ndarray) -> np.ndarray:
        """Where it is."""
        return self.position

    def observe(self) -> dict[str, Any]:
        """Its position."""
        return {"state": self.position.copy()}


class Ramp:
    """The policy: straight plans from the observed position; it continues what it is given as pi0.5 does."""

    def infer(self, observation: dict[str, Any], *, seed: int, previous: Previous | None = None) -> Chunk:
        """One plan float32 [CHUNK, 4], by Euler steps from noise at time 1 to time 0."""
        start = observation["state"]
        target, pull, length = np.zeros((CHUNK, 4), np.float32), np.zeros((CHUNK, 1), np.float32), 0
        if previous is not None:
            left = len(previous.actions)
            target[:left] = (previous.actions - start) / UNIT
            pull[:, 0] = weights(previous.schedule, CHUNK, previous.delay, left)
            length = int(given(previous, left, None)[0])
        x = np.random.default_rng(seed).standard_normal((CHUNK, 4)).astype(np.float32)
        for step, gain in enumerate(gains(STEPS)):
            time = 1.0 - step / STEPS
            x[:length] = target[:length]
            velocity = (x - _clean(x, time, length)) / time
            x = x - (velocity - gain * pull * (target - (x - time * velocity))) / STEPS
        x[:length] = target[:length]
        return Chunk(start + UNIT * x, x, {"total": 0.0})


def _clean(x: np.ndarray, time: float, length: int) -> np.ndarray:
    """The mean of plans that `x` may be a noisy one of: x = (1 - time) * plan + time * noise, slope ~ N(0, SPREAD).

    The first `length` rows are not noisy, and say the slope.
    """
    ahead, plan, part = np.arange(1, CHUNK + 1, dtype=np.float32) / UNIT, np.zeros_like(x), 1.0 - time
    plan[:, 0] = ahead
    if length:
        plan[:, 1] = ahead * (ahead[:length] @ x[:length, 1]) / (ahead[:length] @ ahead[:length])
        return plan
    plan[:, 1] = ahead * (SPREAD**2 * part * (ahead @ x[:, 1]) / (time**2 + part**2 * SPREAD**2 * (ahead @ ahead)))
    return plan


def cell(mode: str, delay: int) -> str:
    """Medians over SEEDS episodes of 5 s with a latency of so many ticks: seam, largest step; ticks without an action."""
    executor = episode.executor(mode, 1 if mode == "ensemble" else EXECUTE)
    latency, point = Latency(1e3 * delay / RATE), Point()
    world: Any = point
    found: list[Outcome] = []
    largest = []
    for seed in range(SEEDS):
        found.append(episode.run(world, Ramp().infer, executor, seed, latency))
        largest.append(point.largest)
    seams = [one.seam for one in found if one.seam is not None]
    seam = f"{np.median(seams):.1f}" if seams else "-"
    waited = sum(one.waited for one in found) / sum(one.ticks for one in found)
    return f"{seam} / {np.median(largest):.1f} / {waited:.0%}"


def table() -> str:
    """Markdown: a row a delay, a column a mode."""
    lines = ["| delay | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for delay in DELAYS:
        cells = " | ".join(cell(mode, delay) for mode in MODES)
        lines.append(f"| {1e3 * delay / RATE:.0f} ms, {delay} ticks | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
