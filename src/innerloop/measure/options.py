"""What a benchmark is asked to do, as data and as the command line that asks for it again."""

import dataclasses
import shlex
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from innerloop.contract import InnerloopError
from innerloop.measure.observations import frame_size

PROGRAM = "innerloop bench"
CHUNK = 10  # actions of random weights
PATHS = ("adapter", "edge", "tokenizer")  # options that name a file or directory


@dataclass(frozen=True)
class BenchOptions:
    """target: a checkpoint directory, or with `random_weights` a family. frames: width x height in pixels.

    chunk: actions of random weights (10 where not said), or of an openpi directory that does not state them.
    prompt_tokens: of the whole prompt; the default is raised where the shortest prompt of the policy has more.
    encoding: raw or jpeg, how frames travel. against: names of other implementations. batch: sizes of a batch curve.
    horizon: executed actions of a chunk (all of them by default). delay_ms: network, both ways. assets, adapter,
    tokenizer: as in innerloop.load, of a checkpoint; edge: a file as `innerloop run --edge` takes it.
    """

    target: str
    random_weights: bool = False
    views: int = 2
    chunk: int | None = None
    steps: int = 10
    prompt_tokens: int = 48
    frames: str = "224x224"
    encoding: str = "raw"
    device: str | None = None
    precision: str | None = None
    kernels: str = "fused"
    ticks: int = 1000
    seed: int = 0
    against: tuple[str, ...] = ()
    batch: tuple[int, ...] = ()
    ladder: bool = False
    control: bool = False
    profile: bool = False
    control_hz: float = 50.0
    environment_ms: float = 0.0
    delay_ms: float = 0.0
    horizon: int | None = None
    assets: str | None = None
    adapter: str | None = None
    edge: str | None = None
    tokenizer: str | None = None

    @property
    def actions(self) -> int:
        """Of a chunk of random weights."""
        return CHUNK if self.chunk is None else self.chunk

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width. Raises InnerloopError for what is no size."""
        return frame_size(self.frames)

    def command(self) -> str:
        """The command line that gives these options; defaults are left out, a path is named by its last part."""
        words = [*PROGRAM.split(), self.target if self.random_weights else Path(self.target).name]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if value == field.default:
                continue
            if field.name in PATHS:
                value = Path(value).name
            if value is True:
                words.append(flag)
            else:
                words += [flag, ",".join(str(v) for v in value) if isinstance(value, tuple) else str(value)]
        return shlex.join(words)


def parse_command(line: str) -> BenchOptions:
    """The inverse of BenchOptions.command. Raises InnerloopError for a line it did not write."""
    words = shlex.split(line)
    program = PROGRAM.split()
    if words[: len(program)] != program or len(words) <= len(program):
        raise InnerloopError(f"'{line}' is not a command of '{PROGRAM}', so it cannot be run again")
    hints = typing.get_type_hints(BenchOptions)
    given: dict[str, Any] = {"target": words[len(program)]}
    rest = iter(words[len(program) + 1 :])
    for word in rest:
        name = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in hints:
            raise InnerloopError(f"'{line}' has the unknown word '{word}'; the record is of another version")
        given[name] = True if hints[name] is bool else _value(hints[name], next(rest, ""))
    return BenchOptions(**given)


def _value(hint: Any, text: str) -> Any:
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(kinds[0](part) for part in text.split(","))
    kind = kinds[0] if isinstance(hint, types.UnionType) else hint
    return kind(text)
