"""The noise a decision starts from: given, or drawn from a seed."""

import os

import numpy as np

from innerloop.contract import ObservationError


def to_noise(noise: object, chunk: int, width: int) -> np.ndarray:
    """float32 [chunk, width], a copy. Raises ObservationError on another shape or dtype, or values not finite."""
    if not isinstance(noise, np.ndarray) or noise.dtype.kind != "f":
        kind = noise.dtype if isinstance(noise, np.ndarray) else type(noise).__name__
        raise ObservationError(f"noise must be a float numpy array of shape ({chunk}, {width}), got {kind}")
    if noise.shape != (chunk, width):
        raise ObservationError(
            f"noise has shape {noise.shape}; this checkpoint takes ({chunk}, {width}), chunk x max_action_dim without batch"
        )
    if np.count_nonzero(np.isfinite(noise)) < noise.size:
        raise ObservationError("noise is not finite; draw it from a normal distribution")
    return np.array(noise, np.float32, order="C")


def draw_noise(seed: int | None, chunk: int, width: int) -> np.ndarray:
    """float32 [chunk, width] standard normal, the same for the same seed on every machine; fresh entropy for None."""
    if seed is not None and (not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0):
        raise ObservationError(f"seed is {seed!r}; it must be a whole number that is not negative")
    source = _fresh if seed is None else np.random.Generator(np.random.PCG64(seed))
    return source.standard_normal((chunk, width), dtype=np.float32)


def _renew() -> None:
    global _fresh
    _fresh = np.random.Generator(np.random.PCG64())


# Seeded once a process, from the system's entropy: asking for it at every decision costs more than the draw.
_fresh = np.random.Generator(np.random.PCG64())
os.register_at_fork(after_in_child=_renew)
