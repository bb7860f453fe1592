"""How alike two chunks of normalised actions are, and when a figure may not be quoted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from innerloop.contract import InnerloopError

Decide = Callable[[Mapping[str, Any], np.ndarray], np.ndarray]  # observation, noise -> normalised actions


class FigureRefused(InnerloopError):
    """The actions behind a figure are not the right actions, so there is no figure."""


@dataclass(frozen=True)
class Limit:
    """The least cosine and the largest difference, on normalised actions.

    max_abs is of the largest action, where that is above one: random weights give actions of any size.
    """

    cosine: float
    max_abs: float


REPLAY = Limit(cosine=0.99999, max_abs=1e-3)  # the captured plan against the interpreter, same kernels
BY_PRECISION = {  # against the official implementation
    "fp32": Limit(cosine=0.99999, max_abs=1e-4),
    "bf16": Limit(cosine=0.999, max_abs=0.05),
    "fp8": Limit(cosine=0.998, max_abs=0.1),
}
LOOSEST = Limit(cosine=0.99, max_abs=0.25)  # four bits


@dataclass(frozen=True)
class Agreement:
    """Worst cosine and worst absolute difference over several chunks, the largest action of the other side, and the cosine
    of all chunks as one vector.
    """

    cosine: float
    max_abs: float
    largest: float
    global_cosine: float

    def flat(self) -> dict[str, float]:
        """For records."""
        return asdict(self)


def compare(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Agreement:
    """Chunk by chunk, over the narrower width: some return the robot's actions, some the model's padded ones.

    Raises FigureRefused on different horizons or NaN.
    """
    pairs = []
    for one, other in zip(ours, theirs, strict=True):
        width = min(one.shape[-1], other.shape[-1])
        a, b = one[..., :width], other[..., :width]
        if a.shape != b.shape:
            raise FigureRefused(f"chunks of shapes {a.shape} and {b.shape} cannot be compared; compare like with like")
        pairs.append((a.astype(np.float64).ravel(), b.astype(np.float64).ravel()))
    found = Agreement(
        cosine=min(cosine_of(*pair) for pair in pairs),
        max_abs=max(float(np.abs(left - right).max()) for left, right in pairs),
        largest=max(float(np.abs(chunk).max()) for chunk in theirs),
        global_cosine=cosine_of(*(np.concatenate(side) for side in zip(*pairs, strict=True))),
    )
    if not np.isfinite([found.cosine, found.max_abs]).all():
        raise FigureRefused("a chunk holds NaN or infinity; run parity to find the stage it comes from")
    return found


def cosine_of(left: np.ndarray, right: np.ndarray) -> float:
    """Of two arrays as vectors; where one is zero, whether both are."""
    length = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(np.vdot(left, right)) / length if length else float(np.array_equal(left, right))


def require(name: str, found: Agreement, limit: Limit) -> None:
    """Raises FigureRefused where the agreement with `name` is below the limit."""
    most = limit.max_abs * max(1.0, found.largest)
    if found.cosine < limit.cosine or found.max_abs > most:
        raise FigureRefused(
            f"actions differ from {name}: cosine {found.cosine:.6f} (at least {limit.cosine}), "
            f"max abs {found.max_abs:.2e} (at most {most:.2e}); run parity to find the first stage that differs"
        )
