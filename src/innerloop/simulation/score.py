"""What so many successes say: intervals, and whether two configurations differ on the same seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964  # 95 %


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a success rate (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, spread = successes / trials, _Z**2 / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Paired:
    """Two configurations on the same episodes. better, worse: episodes that only the first, only the second, solved.

    p: of so uneven a split or a more uneven one if both were equally good (exact McNemar test, two-sided).
    """

    both: int
    better: int
    worse: int
    neither: int
    p: float

    @property
    def text(self) -> str:
        """One line."""
        verdict = "they differ" if self.p < 0.05 else "no difference shown"
        return f"only this {self.better}, only the other {self.worse}, both {self.both}, neither {self.neither}: p = {self.p:.3f}, {verdict}"


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Outcomes of the same episodes in the same order."""
    pairs = list(zip(first, second, strict=True))
    better, worse = pairs.count((True, False)), pairs.count((False, True))
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    return Paired(pairs.count((True, True)), better, worse, pairs.count((False, False)), min(1.0, 2 * tail))
