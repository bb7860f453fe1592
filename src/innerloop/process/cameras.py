"""Which camera is which: names matched at the edge, never by position."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from innerloop.contract import CheckpointError, ObservationError

PREFIX = "observation.images."
_EMPTY = re.compile(r"empty_camera_\d+")  # the name LeRobot gives the slots of `empty_cameras`


def short_name(name: str) -> str:
    """`observation.images.wrist` and `wrist` are the same camera."""
    return name.removeprefix(PREFIX)


@dataclass(frozen=True)
class Cameras:
    """The checkpoint's slots in its order, and the names by which a robot's cameras reach them.

    `rename` is the caller's {robot name: checkpoint name}; `stored` is the checkpoint's own rename step, applied after.
    Slots named `empty_camera_N` are filled by the engine and masked; so are those of `absent`, which the caller says
    that the robot does not have.
    """

    names: tuple[str, ...]
    rename: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    absent: Sequence[str] = ()

    def __post_init__(self) -> None:
        for attribute in ("rename", "stored"):
            pairs = {short_name(a): short_name(b) for a, b in getattr(self, attribute).items()}
            object.__setattr__(self, attribute, pairs)
        for attribute in ("names", "absent"):
            object.__setattr__(self, attribute, tuple(short_name(name) for name in getattr(self, attribute)))
        for name in self.absent:
            if name not in self.names:
                raise ObservationError(
                    f"absent names '{name}', which is not a camera of this checkpoint; its cameras are "
                    f"{', '.join(self.names)}"
                )
        if self.names and set(self.names) <= set(self.absent):
            raise ObservationError(
                f"every camera is declared absent; at least one of {', '.join(self.names)} is needed"
            )
        if not self.required:
            raise CheckpointError("the checkpoint declares no camera in config.json input_features; add the image keys")
        for source, target in self.stored.items():
            if target not in self.names:
                raise CheckpointError(
                    f"rename_observations_processor maps '{source}' to '{target}', which is not a camera of this "
                    f"checkpoint ({self._listed()}); correct policy_preprocessor.json"
                )
        for source, target in self.rename.items():
            if self.stored.get(target, target) not in self.required:
                raise ObservationError(
                    f"rename maps camera '{source}' to '{target}', which is not a camera of this checkpoint; "
                    f"its cameras are {self._listed()}"
                )

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The slots that a robot's cameras fill, in checkpoint order."""
        return tuple(name for name in self.names if name not in self.empty)

    @functools.cached_property
    def empty(self) -> tuple[str, ...]:
        """The slots that no robot fills."""
        return tuple(name for name in self.names if _EMPTY.fullmatch(name) or name in self.absent)

    def check(self, given: Iterable[str]) -> dict[str, str]:
        """{checkpoint name: the name as given}. Raises ObservationError unless the names match exactly."""
        found: dict[str, str] = {}
        unknown: list[str] = []
        for name in given:
            slot = self._slot(name)
            if slot not in self.required:
                unknown.append(name)
            elif slot in found:
                raise ObservationError(f"cameras '{found[slot]}' and '{name}' both mean '{slot}'; send one of them")
            else:
                found[slot] = name
        missing = [name for name in self.required if name not in found]
        if missing or unknown:
            raise ObservationError(self._mismatch(missing, unknown, [*found.values(), *unknown]))
        return found

    def match(self, images: Mapping[str, object]) -> list[object | None]:
        """One entry a slot in checkpoint order; None where the slot is empty or the caller declared it absent."""
        matched = [None if name is None else images[name] for name in self._given(tuple(images))]
        if all(image is None for image in matched):
            raise ObservationError(f"every camera is declared absent; at least one of {self._listed()} is needed")
        return matched

    @functools.cached_property
    def _given(self) -> Callable[[tuple[str, ...]], tuple[str | None, ...]]:
        """By the names of an observation: the name as given for each slot. A robot sends the same ones every time."""

        @functools.lru_cache(maxsize=64)
        def given(names: tuple[str, ...]) -> tuple[str | None, ...]:
            found = self.check(names)
            return tuple(found.get(name) for name in self.names)

        return given

    def _slot(self, name: str) -> str:
        if not isinstance(name, str):
            raise ObservationError(f"camera names are strings, got {name!r}; expected {self._listed()}")
        renamed = self.rename.get(short_name(name), short_name(name))
        return self.stored.get(renamed, renamed)

    def _listed(self) -> str:
        listed = ", ".join(self.required)
        return f"{listed} (and empty: {', '.join(self.empty)})" if self.empty else listed

    def _mismatch(self, missing: list[str], unknown: list[str], given: list[str]) -> str:
        parts = []
        if missing:
            parts.append(f"missing: {', '.join(missing)}")
        if unknown:
            parts.append(f"not in the checkpoint: {', '.join(unknown)}")
        pairs = ", ".join(f"'{u}': '{m}'" for u, m in zip(unknown, missing, strict=False))
        remedy = f"pass rename={{{pairs}}} if these are the same cameras" if pairs else "send exactly the expected ones"
        if missing:
            remedy += ", or send None for a camera this robot does not have (absent in Edge, or in the file of --edge, says it once)"
        if any(short_name(name) in self.empty for name in unknown):
            remedy = "empty slots are filled by the engine: leave them out"
        return (
            f"cameras do not match the checkpoint ({'; '.join(parts)}). "
            f"Expected {self._listed()}; given {', '.join(given) or 'none'}. Remedy: {remedy}"
        )
