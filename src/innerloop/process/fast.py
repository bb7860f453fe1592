"""FAST action tokens to actions: byte-pair tokens -> quantised cosine coefficients -> a chunk (arXiv 2501.09747)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from innerloop.contract import CheckpointError, InnerloopError
from innerloop.process.text import open_backend
from innerloop.weights.fields import Fields


class AnswerError(InnerloopError):
    """The model's answer is not one whole chunk; no action is returned."""


class FastTokenizer:
    """tokenizer.json and processor_config.json of a FAST tokenizer (physical-intelligence/fast)."""

    def __init__(self, decode: Callable[[list[int]], str], size: int, scale: float, least: int) -> None:
        self.size = size  # ids are below this
        self._decode, self._scale, self._least = decode, scale, least

    @classmethod
    def open(cls, directory: Path) -> "FastTokenizer":
        """Raises CheckpointError that says which files to put where."""
        for name in ("tokenizer.json", "processor_config.json"):
            if not (directory / name).is_file():
                raise CheckpointError(f"no {directory / name}: copy it there from the run's FAST tokenizer")
        settings = Fields.read(directory / "processor_config.json")
        backend = open_backend(directory / "tokenizer.json")

        def decode(ids: list[int]) -> str:
            return str(backend.decode(ids, skip_special_tokens=False))

        least = settings.values.get("min_token", 0)
        if type(least) is not int:
            raise settings.wrong("min_token", "a whole number")
        return cls(decode, settings.size("vocab_size", backend.get_vocab_size()), settings.number("scale", 10), least)

    def actions(self, ids: Sequence[int], chunk: int, width: int) -> np.ndarray:
        """FAST ids -> float32 [chunk, width], normalised. Raises AnswerError where they are not one whole chunk."""
        text = self._decode(list(ids))
        if len(text) != chunk * width:
            raise AnswerError(
                f"the answer holds {len(text)} coefficients in {len(ids)} tokens, a chunk has {chunk} x {width}; "
                "no action is returned. Check the observation and the prompt against what the policy was trained with"
            )
        coefficients = np.array([ord(character) + self._least for character in text], np.float64) / self._scale
        chunked: np.ndarray = cosines(chunk).T @ coefficients.reshape(chunk, width)
        return chunked.astype(np.float32)


def cosines(size: int) -> np.ndarray:
    """The orthonormal cosine transform (type II) of `size` points: row k is frequency k; its transpose inverts it."""
    k, n = np.mgrid[:size, :size]
    matrix: np.ndarray = math.sqrt(2 / size) * np.cos(math.pi * (2 * n + 1) * k / (2 * size))
    matrix[0] /= math.sqrt(2)
    return matrix
