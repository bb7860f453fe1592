"""What Qwen3-VL's processor does to images and a chat turn: smart resize, patches, tokens, three-axis positions."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from innerloop.contract import CheckpointError, ObservationError
from innerloop.kernels.resample import room
from innerloop.process.image import FRAME_BYTES
from innerloop.process.resample import Operation, Resize, applied, nothing, program
from innerloop.process.text import open_backend
from innerloop.weights.fields import Fields

MAX_ASPECT = 200  # transformers qwen2_vl smart_resize
MORE_TOKENS = "the prompt holds more image tokens than there are images; take them out of the text"


@dataclass(frozen=True)
class ImageRules:
    """preprocessor_config.json; the defaults are those of the published Qwen3-VL checkpoints."""

    patch: int = 16
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216

    @classmethod
    def read(cls, path: Path) -> "ImageRules":
        """From a preprocessor_config.json. Raises CheckpointError for a normalisation that is not Qwen3-VL's."""
        content = Fields.read(path)
        if any(content.values.get(name, [0.5] * 3) != [0.5] * 3 for name in ("image_mean", "image_std")):
            raise CheckpointError(f"{path}: image_mean and image_std must be 0.5, as every Qwen3-VL has them")
        edges = content.section("size")
        return cls(
            patch=content.size("patch_size", cls.patch),
            merge=content.size("merge_size", cls.merge),
            temporal=content.size("temporal_patch_size", cls.temporal),
            min_pixels=content.size("min_pixels", edges.size("shortest_edge", cls.min_pixels)),
            max_pixels=content.size("max_pixels", edges.size("longest_edge", cls.max_pixels)),
        )

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize: multiples of patch * merge, pixels within limits, aspect roughly kept."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ObservationError(f"an image of {height}x{width} is too thin; its sides may differ {MAX_ASPECT} times")
        unit = self.patch * self.merge
        tall, wide = round(height / unit) * unit, round(width / unit) * unit
        if tall * wide > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(unit, math.floor(side / ratio / unit) * unit) for side in (height, width))
        elif tall * wide < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * ratio / unit) * unit for side in (height, width))
        return tall, wide

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        tall, wide = self.fitted(height, width)
        return tall // self.patch, wide // self.patch

    def operations(self, height: int, width: int) -> tuple[Operation, ...]:
        """The resize of an image that is not of a fitted size."""
        size = self.fitted(height, width)
        return () if size == (height, width) else (Resize("bicubic", *size),)

    def patches(self, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """uint8 [H, W, 3] -> uint8 [patches, 3 * patch^2] in merge order (row, column, channel), and the grid.

        What the plan makes of a frame, on the host.
        """
        image = applied(self.operations(*image.shape[:2]), image)
        (tall, wide), merge = image.shape[:2], self.merge
        rows, columns = tall // self.patch, wide // self.patch
        blocks = image.reshape(rows // merge, merge, self.patch, columns // merge, merge, -1)
        return blocks.transpose(0, 3, 1, 4, 2, 5).reshape(rows * columns, -1), (rows, columns)


class Patches(Protocol):
    """How a vision tower cuts images."""

    @property
    def patch_size(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def temporal(self) -> int: ...


def image_rules(places: Iterable[Path | None], vision: Patches) -> ImageRules:
    """preprocessor_config.json of the first directory that has one, else Qwen3-VL's own; the tower's patches."""
    files = (place / "preprocessor_config.json" for place in places if place is not None)
    found = next((ImageRules.read(file) for file in files if file.is_file()), ImageRules())
    return replace(found, patch=vision.patch_size, merge=vision.merge, temporal=vision.temporal)


@dataclass(frozen=True)
class Slots:
    """Room for images and tokens in one decision: each image has `patches` rows of its own.

    resizes: how often a frame may be resized in the plan; one that needs more is resized on the host.
    """

    images: int
    patches: int
    tokens: int
    resizes: int = 1

    @classmethod
    def of(cls, images: int, patches: int, merge: int, text: int, resizes: int = 1) -> "Slots":
        """With tokens for the images, two marks around each, and `text`."""
        return cls(images, patches, images * (patches // merge**2 + 2) + text, resizes)

    def image_tokens(self, merge: int) -> int:
        """Rows of visual tokens over all slots."""
        return self.images * (self.patches // merge**2)


@dataclass(frozen=True)
class Special:
    """Ids of the tokens around and inside an image."""

    start: int
    pad: int
    end: int


class ChatTokenizer:
    """tokenizer.json of a Qwen; special tokens inside a text are recognised."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        special: Special,
        source: str = "",
    ) -> None:
        self.special = special
        self.source = source
        self.decode = decode
        self._encode = functools.lru_cache(maxsize=256)(lambda text: tuple(encode(text)))

    @classmethod
    def open(cls, path: Path) -> "ChatTokenizer":
        """Raises CheckpointError where the file is not a Qwen3-VL tokenizer."""
        backend = open_backend(path)
        found = (backend.token_to_id(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end"))
        ids = [index for index in found if index is not None]
        if len(ids) < 3:
            raise CheckpointError(f"{path} has no <|vision_start|>, <|image_pad|> or <|vision_end|>: not a Qwen3-VL's")

        def encode(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

        def decode(ids: list[int]) -> str:
            return str(backend.decode(ids, skip_special_tokens=True))

        return cls(encode, decode, Special(*ids), str(path))

    def ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text."""
        return self._encode(text)

    def turn(self, counts: Sequence[int], text: str, answer: bool = True) -> list[int]:
        """One user turn, images before text, and the opening of the answer if wanted; counts: tokens of each image.

        Qwen3-VL's chat template without a system message.
        """
        return [*self.before(counts), *self.after(text, answer)]

    def before(self, counts: Sequence[int]) -> list[int]:
        """The turn up to its text."""
        ids = list(self.ids("<|im_start|>user\n"))
        for count in counts:
            ids += [self.special.start, *[self.special.pad] * count, self.special.end]
        return ids

    def after(self, text: str, answer: bool) -> tuple[int, ...]:
        """The turn from its text on."""
        opening = "<|im_start|>assistant\n" if answer else ""
        return self.ids(f"{text}<|im_end|>\n{opening}")


def positions(ids: Sequence[int], pad: int, grids: Sequence[tuple[int, int]], merge: int) -> np.ndarray:
    """int32 [3, T]: time, height and width of each token; an image takes as many positions as its longer side.

    transformers Qwen3VLModel.get_rope_index for images.
    """
    out = np.empty((3, len(ids)), np.int32)
    at, position, remaining = 0, 0, list(grids)
    places = iter(np.flatnonzero(np.asarray(ids) == pad).tolist())
    for start in places:
        if not remaining:
            raise ObservationError(MORE_TOKENS)
        rows, columns = (side // merge for side in remaining.pop(0))
        count = rows * columns
        out[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        index = np.arange(count)
        out[:, start : start + count] = position + np.stack([0 * index, index // columns, index % columns])
        at, position = start + count, position + max(rows, columns)
        deque(islice(places, count - 1), maxlen=0)  # the rest of this image
    out[:, at:] = np.arange(position, position + len(ids) - at)
    return out


def visual_rows(ids: Sequence[int], pad: int, grids: Sequence[tuple[int, int]], slots: Slots, merge: int) -> np.ndarray:
    """int32 [T]: the visual token that stands at each place, -1 for text."""
    out = np.full(len(ids), -1, np.int32)
    per_slot = slots.patches // merge**2
    rows = [slot * per_slot + np.arange(h * w // merge**2) for slot, (h, w) in enumerate(grids)]
    flat = np.concatenate([*rows, np.zeros(0, int)])
    places = np.flatnonzero(np.asarray(ids) == pad)
    if len(places) != len(flat):
        raise ObservationError(f"the prompt holds {len(places)} image tokens, its images give {len(flat)}")
    out[places] = flat
    return out


Grids = tuple[tuple[int, int], ...]
Derived = Callable[[np.ndarray], Mapping[str, np.ndarray]]

_NO_FRAME = np.zeros(1, np.uint8)


class Way(NamedTuple):
    """How a frame of one size becomes patches. host: what is done before it is sent; resizes: words of the plan's part."""

    host: tuple[Operation, ...]
    resizes: np.ndarray
    grid: tuple[int, int]


class Cut(NamedTuple):
    """A frame as it is sent, flat; the words of its resizes; rows and columns of patches."""

    frame: np.ndarray
    resizes: np.ndarray
    grid: tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """inputs: numpy arrays named like the buffers of blocks.qwen3_vl; tokens: of the whole sequence.

    All but `frames` are made once for a text and the sizes of its images, and are read-only; a row of `frames` may be
    the caller's.
    """

    inputs: dict[str, Any]
    tokens: int


class Encoder:
    """Images and a text -> the inputs of a Qwen3-VL plan. `answer`: the sequence ends with the opening of an answer.

    derived: further inputs that follow from a turn's ids [T] alone.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        rules: ImageRules,
        slots: Slots,
        answer: bool = True,
        derived: Derived = lambda ids: {},
    ) -> None:
        self.tokenizer, self.rules, self.slots, self.answer = tokenizer, rules, slots, answer
        self._derived = derived
        self._nothing = nothing(slots.resizes)
        self._ways = functools.lru_cache(maxsize=64)(self._way)
        self._grids = functools.lru_cache(maxsize=64)(self._sizes)
        self._opened = functools.lru_cache(maxsize=64)(self._opening)
        self._told = functools.lru_cache(maxsize=256)(self._turn)

    def encode(self, images: Sequence[np.ndarray], text: str) -> Encoded:
        """images uint8 [H, W, 3] each. Raises ObservationError for what does not fit the slots."""
        cut = [self.cut(image) for image in images]
        pictures, told = self.pictures(cut), self.turn(cut, text)
        return Encoded({**pictures, **told.inputs}, told.tokens)

    def cut(self, image: np.ndarray, operations: Sequence[Operation] = ()) -> Cut:
        """One image uint8 [H, W, 3], and what is done to it before the smart resize.

        Raises ObservationError where its patches are too many.
        """
        height, width, _ = image.shape
        way = self._ways(height, width, tuple(operations))
        return Cut(np.ascontiguousarray(applied(way.host, image)).reshape(-1), way.resizes, way.grid)

    def pictures(self, cut: Sequence[Cut]) -> dict[str, Any]:
        """The inputs of the vision stages: images that are cut. Raises ObservationError where they are too many."""
        empty = self.slots.images - len(cut)
        if empty < 0:
            raise ObservationError(f"{len(cut)} images were given, there is room for {self.slots.images}")
        frames = tuple(one.frame for one in cut) + (_NO_FRAME,) * empty
        resizes = tuple(one.resizes for one in cut) + (self._nothing,) * empty
        return {"frames": frames, "resizes": resizes, "grids": self._grids(tuple(one.grid for one in cut))}

    def turn(self, cut: Sequence[Cut], text: str) -> Encoded:
        """The other inputs: one turn of these images and a text. Raises ObservationError for what does not fit the slots."""
        return self._told(tuple(one.grid for one in cut), text)

    def _way(self, height: int, width: int, operations: tuple[Operation, ...]) -> Way:
        """In the plan, or on the host what it has no room for."""
        tall, wide = (operations[-1].height, operations[-1].width) if operations else (height, width)
        fitted, (rows, columns) = self.rules.operations(tall, wide), self.rules.grid(tall, wide)
        if rows * columns > self.slots.patches:
            raise ObservationError(
                f"an image of {tall}x{wide} becomes {rows}x{columns} patches, there is room for "
                f"{self.slots.patches}; send a smaller one"
            )
        steps, space = self.slots.resizes, room(self.slots.patches, self.rules.patch)
        sent = 3 * height * width <= FRAME_BYTES
        words = program((height, width), (*operations, *fitted), steps, space) if sent else None
        if words is not None:
            return Way((), words, (rows, columns))
        words = program((rows * self.rules.patch, columns * self.rules.patch), (), steps, space)
        if words is None:
            raise ObservationError(f"an image of {tall}x{wide} is too thin to be cut; send one that is less so")
        return Way((*operations, *fitted), words, (rows, columns))

    def _turn(self, grids: Grids, text: str) -> Encoded:
        """What follows from the text and the sizes of the images."""
        slots, (before, places, rows) = self.slots, self._opened(grids)
        after = self.tokenizer.after(text, self.answer)
        if self.tokenizer.special.pad in after:
            raise ObservationError(MORE_TOKENS)
        count, length = len(before), len(before) + len(after)
        if length > slots.tokens:
            raise ObservationError(f"images and prompt take {length} tokens, there is room for {slots.tokens}")
        tokens, positions = np.zeros(slots.tokens, np.int32), np.zeros((3, slots.tokens), np.int32)
        tokens[:count], tokens[count:length], positions[:, :count] = before, after, places
        first = places[0, -1] + 1  # what precedes the text is a mark
        positions[:, count:length] = np.arange(first, first + len(after))
        inputs = {
            "tokens": tokens,
            "positions": positions,
            "visual_rows": rows,
            "prompt_length": np.array([length], np.int32),
            **self._derived(tokens[:length]),
        }
        for array in inputs.values():
            array.setflags(write=False)
        return Encoded(inputs, length)

    def _sizes(self, grids: Grids) -> np.ndarray:
        """`grids` of the plan: those of the images, zeros for the other slots."""
        rows = np.zeros((self.slots.images, 2), np.int32)
        rows[: len(grids)] = np.reshape(grids, (-1, 2))
        rows.setflags(write=False)
        return rows

    def _opening(self, grids: Grids) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Ids of the turn up to its text, their positions, and the visual rows of the whole room."""
        merge, pad = self.rules.merge, self.tokenizer.special.pad
        ids = self.tokenizer.before([h * w // merge**2 for h, w in grids])
        rows = np.full(max(self.slots.tokens, len(ids)), -1, np.int32)
        rows[: len(ids)] = visual_rows(ids, pad, grids, self.slots, merge)
        return ids, positions(ids, pad, grids, merge), rows
