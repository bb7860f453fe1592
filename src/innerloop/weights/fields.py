"""A configuration read field by field: one of another kind is named with its file, its place and what it should be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from innerloop.contract.errors import CheckpointError
from innerloop.weights.source import read_object


@dataclass(frozen=True)
class Fields:
    """An object of a configuration file, at `place` in it. A field that is absent or null is its default.

    Every method raises CheckpointError for a field of another kind, and for one that is absent and has no default.
    """

    file: str | Path
    values: Mapping[str, Any]
    place: str = ""

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """A JSON file's."""
        return cls(path, read_object(path))

    def section(self, name: str, required: bool = False) -> "Fields":
        """An object inside this one; empty where it is absent."""
        found = self._stated(name, None if required else {}, "an object of names and values")
        if not isinstance(found, Mapping):
            raise self.wrong(name, "a section of names and values")
        return Fields(self.file, found, f"{self.place}{name}.")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        return self._whole(name, default, 1, "a positive whole number")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 included."""
        return self._whole(name, default, 0, "a whole number, 0 or more")

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._stated(name, default, "a positive number")
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise self.wrong(name, "a positive number")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        found = self._stated(name, default, "true or false")
        if not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return found

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        found = self._stated(name, default, "a string")
        if not isinstance(found, str):
            raise self.wrong(name, "a string")
        return found

    def counts(self, name: str, length: int | None = None, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of whole numbers, 0 included; `length`: of how many."""
        expected = f"a list of {'' if length is None else f'{length} '}whole numbers"
        found = self._stated(name, default, expected)
        fits = isinstance(found, list | tuple) and length in (None, len(found))
        if not fits or not all(type(item) is int and item >= 0 for item in found):
            raise self.wrong(name, expected)
        return tuple(found)

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field that is not what it should be."""
        said = repr(self.values.get(name))
        return CheckpointError(f"{self.file}: {self.place}{name} is {said[:80]}; it must be {expected}")

    def _whole(self, name: str, default: int | None, least: int, expected: str) -> int:
        found = self._stated(name, default, expected)
        if type(found) is not int or found < least:
            raise self.wrong(name, expected)
        return found

    def _stated(self, name: str, default: Any, expected: str) -> Any:
        found = self.values.get(name)
        if found is not None:
            return found
        if default is None:
            raise CheckpointError(f"{self.file} has no '{self.place}{name}', {expected}: add it, or export it again")
        return default
