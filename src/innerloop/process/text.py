"""The prompt: a family's template around the task, then PaliGemma tokens with BOS, right padded."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from innerloop.contract import CheckpointError, ObservationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_FILES = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")


@dataclass(frozen=True)
class Template:
    """`render(task, bins)` gives the pieces that are tokenised one by one; BOS goes before the first."""

    name: str
    render: Callable[[str, Sequence[int] | None], tuple[str, ...]]
    takes_state: bool = False


def clean(task: str) -> str:
    """The task on one line with underscores as spaces (openpi models/tokenizer.py, LeRobot processor_pi05.py)."""
    return task.strip().replace("_", " ").replace("\n", " ")


def _line(task: str, bins: Sequence[int] | None) -> tuple[str, ...]:
    return (task if task.endswith("\n") else task + "\n",)


def _cleaned_line(task: str, bins: Sequence[int] | None) -> tuple[str, ...]:
    return (clean(task), "\n")


def _task_and_state(task: str, bins: Sequence[int] | None) -> tuple[str, ...]:
    if bins is None:
        raise ObservationError("this prompt contains the state; pass observation['state']")
    return (f"Task: {clean(task)}, State: {' '.join(map(str, bins))};\nAction: ",)


LINE = Template("<task>\\n", _line)  # pi0 in LeRobot: the task as it is
CLEANED_LINE = Template("<cleaned task> + \\n", _cleaned_line)  # pi0 in openpi, and pi05 without state in the prompt
TASK_AND_STATE = Template("Task: <cleaned task>, State: <bins>;\\nAction: ", _task_and_state, takes_state=True)


class Tokenizer:
    """PaliGemma's text side over a `tokenizer.json` or a SentencePiece `.model`; the same text gives the same ids."""

    def __init__(self, encode: Callable[[str], list[int]], bos: int, size: int, source: str) -> None:
        self.size = size  # ids are below this
        self.source = source
        self._encode = encode
        self._bos = bos
        self._ids = functools.lru_cache(maxsize=256)(self._tokenize)

    @classmethod
    def open(cls, path: str | Path | None, checkpoint: str | Path = "the checkpoint directory") -> "Tokenizer":
        """A tokenizer file or a directory that holds one. Raises CheckpointError that says which file to put where."""
        if path is None:
            raise CheckpointError(
                f"no tokenizer in {checkpoint}: put PaliGemma's tokenizer.json (from google/paligemma-3b-pt-224) or "
                "paligemma_tokenizer.model there, or pass tokenizer='path/to/either'"
            )
        file = _find(Path(path))
        return cls._sentencepiece(file) if file.suffix == ".model" else cls._tokenizers(file)

    @classmethod
    def _tokenizers(cls, file: Path) -> "Tokenizer":
        backend = open_backend(file)
        bos = backend.token_to_id("<bos>")
        if bos is None:
            raise CheckpointError(f"{file} has no <bos> token, so it is not PaliGemma's; use the policy's own")

        def encode(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

        return cls(encode, bos, backend.get_vocab_size(), str(file))

    @classmethod
    def _sentencepiece(cls, file: Path) -> "Tokenizer":
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise CheckpointError(f"{file} needs SentencePiece: pip install 'innerloop[sentencepiece]'") from error
        try:
            backend = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{file} is not a readable SentencePiece model ({error}); copy it again") from error
        # bos_id() follows the name that the file's training settings give; the piece itself may still be there.
        bos = backend.bos_id() if backend.bos_id() >= 0 else backend.piece_to_id("<bos>")
        if bos == backend.unk_id():
            raise CheckpointError(f"{file} has no BOS token, so it is not PaliGemma's; use the policy's own")
        return cls(backend.encode, bos, backend.vocab_size(), str(file))

    def ids(self, pieces: Iterable[str]) -> tuple[int, ...]:
        """BOS and the ids of all pieces, unpadded."""
        return self._ids(tuple(pieces))

    def _tokenize(self, pieces: tuple[str, ...]) -> tuple[int, ...]:
        ids = [self._bos]
        for piece in pieces:
            ids += self._encode(piece)
        return tuple(ids)


def fit(ids: Sequence[int], capacity: int) -> np.ndarray:
    """int32 [capacity], right padded with 0. Refuses a longer prompt; LeRobot and openpi cut it silently."""
    if len(ids) > capacity:
        raise ObservationError(
            f"the prompt has {len(ids)} tokens with its template, the checkpoint takes {capacity}; shorten the task"
        )
    out = np.zeros(capacity, np.int32)
    out[: len(ids)] = ids
    return out


def open_backend(file: Path) -> "Backend":
    """A tokenizer.json, without padding or truncation. Raises CheckpointError for what this library cannot read."""
    import tokenizers

    _check_json(file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # the library raises nothing narrower for a file of another version
            raise
        raise CheckpointError(
            f"{file} cannot be read by tokenizers {tokenizers.__version__} ({error}): copy it again, or update the "
            "package: pip install -U tokenizers"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def _check_json(file: Path) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON ({error}); copy it again") from error
    if not isinstance(content, dict) or "model" not in content:
        raise CheckpointError(f"{file} has no 'model' entry, so it is not a tokenizer.json; copy the right file")


def _find(path: Path) -> Path:
    if path.is_file():
        if path.suffix not in (".json", ".model"):
            raise CheckpointError(f"tokenizer {path}: expected a tokenizer.json or a SentencePiece .model file")
        return path
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"no tokenizer at {path}: expected a file, or a directory with one of {', '.join(_FILES)}")
