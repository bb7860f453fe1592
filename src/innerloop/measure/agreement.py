"""How alike two chunks of normalised actions are, and when a figure may not be quoted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """Worst cosine and worst absolute difference over several chunks, and the largest action of the other side."""

    cosine: float
    max_abs: float
    largest: float

    def flat(self) -> dict[str, float]:
        """For records."""
        return {"cosine": self.cosine, "max_abs": self.max_abs, "largest": self.largest}


def compare(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Agreement:
    """Chunk by chunk, over the narrower width: some return the robot's actions, some the model's padded ones.

    Raises FigureRefused on different horizons or NaN.
    """
    cosines, differences = [], []
    for one, other in zip(ours, theirs, strict=True):
        width = min(one.shape[-1], other.shape[-1])
        a, b = one[..., :width], other[..., :width]
        if a.shape != b.shape:
            raise FigureRefused(f"chunks of shapes {a.shape} and {b.shape} cannot be compared; compare like with like")
        left, right = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
        length = float(np.linalg.norm(left) * np.linalg.norm(right))
        cosines.append(float(left @ right) / length if length else float(np.array_equal(left, right)))
        differences.append(float(np.abs(left - right).max()))
    worst = Agreement(min(cosines), max(differences), max(float(np.abs(chunk).max()) for chunk in theirs))
    if not np.isfinite([worst.cosine, worst.max_abs]).all():
        raise FigureRefused("a chunk holds NaN or infinity; run parity to find the stage it comes from")
    return worst


def require(name: str, found: Agreement, limit: Limit) -> None:
    """Raises FigureRefused where the agreement with `name` is below the limit."""
    most = limit.max_abs * max(1.0, found.largest)
    if found.cosine < limit.cosine or found.max_abs > most:
        raise FigureRefused(
            f"actions differ from {name}: cosine {found.cosine:.6f} (at least {limit.cosine}), "
            f"max abs {found.max_abs:.2e} (at most {most:.2e}); run parity to find the first stage that differs"
        )
