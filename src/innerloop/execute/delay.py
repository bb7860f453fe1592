"""How many control steps pass between an observation and the first action made from it."""

import math
from collections import deque

import numpy as np

WINDOW = 50  # latencies that the estimate remembers
PERCENTILE = 90.0


class Delay:
    """A percentile over the last latencies, in steps of `rate_hz`, rounded up; a spike leaves it with the window."""

    def __init__(self, rate_hz: float) -> None:
        self.rate_hz = rate_hz
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def measure(self, seconds: float) -> None:
        """One warm request; a first call, which loads and compiles, is not to be counted."""
        self._seconds.append(seconds)

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._seconds)

    @property
    def steps(self) -> int:
        """Control steps, 0 until a latency is known."""
        return self.of(float(np.percentile(self._seconds, PERCENTILE))) if self._seconds else 0

    def of(self, seconds: float) -> int:
        """Control steps that so much time takes."""
        return math.ceil(seconds * self.rate_hz - 1e-9)
