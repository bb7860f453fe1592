"""Qwen3-VL as stages: grids and lengths -> layout, pixels -> visual tokens, tokens -> every layer's output."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from innerloop.blocks import qwen3_names
from innerloop.blocks.qwen3 import Qwen3, Qwen3Sizes, Reading, rotary
from innerloop.blocks.qwen3_vision import Grid, Qwen3Vision, Qwen3VisionSizes
from innerloop.contract import Buffer, CheckpointError, Role, Stage
from innerloop.kernels import embedding, resample
from innerloop.process.image import FRAME_BYTES
from innerloop.process.qwen3vl import Slots
from innerloop.process.resample import program
from innerloop.weights.fields import Fields

Tensors = Mapping[str, torch.Tensor]

TICKS = {
    "frames": "observation",
    "resizes": "observation",
    "grids": "observation",
    "tokens": "prompt",
    "positions": "prompt",
    "visual_rows": "prompt",
    "prompt_length": "prompt",
}
# What a stage that runs the language model reads.
LANGUAGE_READS = ("tokens", "visual_rows", "feature_rows", "visual", "key_valid", "rotary_cos", "rotary_sin")
LAYOUT = ("key_valid", "rotary_cos", "rotary_sin", "feature_rows")
GRID = ("patch_valid", "patch_cos", "patch_sin", "patch_position")


@dataclass(frozen=True)
class Qwen3VLSizes:
    """Both towers."""

    vision: Qwen3VisionSizes
    language: Qwen3Sizes


class Qwen3VL(nn.Module):
    """Both towers, without final norm and vocabulary head."""

    def __init__(self, sizes: Qwen3VLSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision = Qwen3Vision(sizes.vision)
        self.language = Qwen3(sizes.language)


def names(sizes: Qwen3VLSizes, theirs: str, ours: str) -> qwen3_names.Names:
    """Names of Qwen3VL: `theirs` ends before `visual` and `language_model`."""
    found = qwen3_names.vision(sizes.vision, f"{theirs}visual.", f"{ours}vision.")
    return found | qwen3_names.language(sizes.language, f"{theirs}language_model.", f"{ours}language.")


def read_language(text: Fields, tied: bool) -> Qwen3Sizes:
    """Sizes from a text_config, or from the config.json of a Qwen3 without vision."""
    rope = text.section("rope_parameters" if text.values.get("rope_parameters") else "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(
            f"{text.file} asks for rope_type '{kind}'; only the default rotary embedding is known to this engine"
        )
    heads, half = text.size("num_attention_heads"), text.size("head_dim", 128) // 2
    time, height, width = rope.counts("mrope_section", 3, (half, 0, 0))
    return Qwen3Sizes(
        width=text.size("hidden_size"),
        depth=text.size("num_hidden_layers"),
        mlp_dim=text.size("intermediate_size"),
        heads=heads,
        kv_heads=text.size("num_key_value_heads", heads),
        head_dim=2 * half,
        vocab_size=text.size("vocab_size"),
        rope_theta=rope.number("rope_theta", text.number("rope_theta", 1e6)),
        sections=(time, height, width),
        eps=text.number("rms_norm_eps", 1e-6),
        tied=tied,
    )


def read_vision(vision: Fields) -> Qwen3VisionSizes:
    """Sizes from a vision_config."""
    patch, places, layers = (vision.size(name) for name in ("patch_size", "num_position_embeddings", "depth"))
    width, heads = vision.size("hidden_size"), vision.size("num_heads")
    if width % (4 * heads):
        raise vision.wrong("num_heads", f"such that each has a multiple of 4 of the {width} dimensions")
    deepstack = vision.counts("deepstack_visual_indexes", default=())
    if len({*deepstack}) < len(deepstack) or max(deepstack, default=0) >= layers:
        raise vision.wrong("deepstack_visual_indexes", f"different layers of {layers}, the first one 0")
    return Qwen3VisionSizes(
        hidden_size=width,
        intermediate_size=vision.size("intermediate_size"),
        layers=layers,
        heads=heads,
        patch_size=patch,
        image_size=round(places**0.5) * patch,
        out=vision.size("out_hidden_size"),
        merge=vision.size("spatial_merge_size"),
        temporal=vision.size("temporal_patch_size"),
        deepstack=deepstack,
    )


def read_sizes(config: Fields) -> Qwen3VLSizes:
    """Sizes from the config.json of a Qwen3-VL."""
    text, vision = (config.section(name, required=True) for name in ("text_config", "vision_config"))
    tied = text.flag("tie_word_embeddings", config.flag("tie_word_embeddings", False))
    return Qwen3VLSizes(read_vision(vision), read_language(text, tied))


def buffers(sizes: Qwen3VLSizes, slots: Slots, batch: int, dtype: torch.dtype) -> list[Buffer]:
    """Inputs and state of one decision, in plan order."""
    v, t, b, images = sizes.vision, sizes.language, batch, batch * slots.images
    f32, i32, rows, (words, _) = torch.float32, torch.int32, slots.tokens, resample.room(slots.patches, v.patch_size)
    visual = (1 + len(v.deepstack), batch * slots.image_tokens(v.merge) + 1, t.width)
    return [
        Buffer("frames", (b, slots.images, max(FRAME_BYTES, slots.patches * v.patch_bytes)), torch.uint8, Role.INPUT),
        Buffer("resizes", (b, slots.images, words), i32, Role.INPUT),
        Buffer("grids", (b, slots.images, 2), i32, Role.INPUT),
        Buffer("tokens", (b, rows), i32, Role.INPUT),
        Buffer("positions", (b, 3, rows), i32, Role.INPUT),
        Buffer("visual_rows", (b, rows), i32, Role.INPUT),
        Buffer("prompt_length", (b, 1), i32, Role.INPUT),
        Buffer("pixels", (images, slots.patches, v.patch_bytes), torch.uint8, Role.STATE),
        Buffer("patch_valid", (images, slots.patches), i32, Role.STATE),
        Buffer("patch_cos", (images, slots.patches, v.head_dim // 2), f32, Role.STATE),
        Buffer("patch_sin", (images, slots.patches, v.head_dim // 2), f32, Role.STATE),
        Buffer("patch_position", (images, slots.patches, v.hidden_size), dtype, Role.STATE),
        Buffer("key_valid", (b, rows), i32, Role.STATE),
        Buffer("rotary_cos", (b, rows, t.head_dim // 2), f32, Role.STATE),
        Buffer("rotary_sin", (b, rows, t.head_dim // 2), f32, Role.STATE),
        Buffer("feature_rows", (b, rows), i32, Role.STATE),
        Buffer("visual", visual, dtype, Role.STATE),
    ]


def grid_stage(vision: Qwen3Vision, slots: Slots) -> Stage:
    """Sizes of the images -> which patches count, their rotary angles and positions."""

    def run(b: Tensors) -> None:
        grid = vision.grid(b["grids"].flatten(0, 1), slots.patches)
        for name, value in zip(GRID, (grid.valid, grid.cos, grid.sin, grid.position), strict=True):
            b[name].copy_(value)

    return Stage("grid", run, ("grids",), GRID)


def layout_stage(language: Qwen3Sizes, slots: Slots, merge: int) -> Stage:
    """Length, positions and places of visual tokens -> valid keys, rotary angles, rows of `visual`."""
    per_robot = slots.image_tokens(merge)

    def run(b: Tensors) -> None:
        rows, robots = b["visual_rows"], len(b["visual_rows"])
        index = torch.arange(slots.tokens, device=rows.device)[None]
        b["key_valid"].copy_(index < b["prompt_length"])
        cos, sin = rotary(b["positions"], language)
        b["rotary_cos"].copy_(cos)
        b["rotary_sin"].copy_(sin)
        first = per_robot * torch.arange(robots, device=rows.device)[:, None]
        b["feature_rows"].copy_(torch.where(rows < 0, robots * per_robot, rows + first))  # the last row is zero

    return Stage("layout", run, ("visual_rows", "prompt_length", "positions"), LAYOUT)


def resize_stage(sizes: Qwen3VisionSizes, slots: Slots) -> Stage:
    """uint8 frames of any size -> uint8 patches, as the words that come with them say."""

    def run(b: Tensors) -> None:
        frames, words = b["frames"].flatten(0, 1), b["resizes"].flatten(0, 1)
        patches = resample.resample(frames, words, slots.resizes, slots.patches, sizes.patch_size, sizes.merge)
        b["pixels"].copy_(patches)

    return Stage("resize", run, ("frames", "resizes"), ("pixels",))


def vision_stage(vision: Qwen3Vision) -> Stage:
    """Pixels -> visual tokens and DeepStack features, and after them a row of zeros."""

    def run(b: Tensors) -> None:
        vision(b["pixels"], Grid(*(b[name] for name in GRID)), b["visual"][:, :-1])
        b["visual"][:, -1].zero_()

    return Stage("vision", run, ("pixels", *GRID), ("visual",))


def embed(b: Tensors, language: Qwen3, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first `rows` tokens, [B, rows, D]: text and visual tokens, and what DeepStack adds to the first layers."""
    x, *deepstack = embedding.interleave(
        b["tokens"][:, :rows], language.embedding, b["feature_rows"][:, :rows], b["visual"]
    )
    return x, deepstack


def outputs(
    b: Tensors, language: Qwen3, rows: int, cache: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """Each layer's output [B, rows, D] in turn, over the first `rows` tokens; reads LANGUAGE_READS.

    cache: keys and values [L, B, >= rows, Hkv, hd] where they are read later.
    """
    x, deepstack = embed(b, language, rows)
    cos, sin = b["rotary_cos"][:, :rows].contiguous(), b["rotary_sin"][:, :rows].contiguous()
    reading = Reading(cos, sin, b["key_valid"][:, :rows].contiguous(), cache)
    yield from language.outputs(x, reading, deepstack)


def last(outputs: Iterator[torch.Tensor]) -> torch.Tensor:
    """The last of them; only one is kept alive at a time."""
    return deque(outputs, maxlen=1).pop()


def sample(sizes: Qwen3VLSizes, slots: Slots, batch: int, length: int) -> dict[str, Any]:
    """Made-up inputs that fill every slot and `length` tokens."""
    rng, merge = np.random.default_rng(0), sizes.vision.merge
    visual, rows = slots.image_tokens(merge), np.full((batch, slots.tokens), -1, np.int32)
    rows[:, 4 : 4 + visual] = np.arange(visual)
    patch, images = sizes.vision.patch_size, batch * slots.images
    size = (merge * patch, slots.patches // merge * patch)
    words = program(size, (), slots.resizes, resample.room(slots.patches, patch))
    return {
        "frames": [rng.integers(0, 256, 3 * size[0] * size[1], np.uint8) for _ in range(images)],
        "resizes": [words] * images,
        "grids": np.full((batch, slots.images, 2), (merge, slots.patches // merge), np.int32),
        "tokens": rng.integers(0, sizes.language.vocab_size, (batch, slots.tokens), dtype=np.int32),
        "positions": np.broadcast_to(np.arange(slots.tokens, dtype=np.int32), (batch, 3, slots.tokens)).copy(),
        "visual_rows": rows,
        "prompt_length": np.full((batch, 1), length, np.int32),
    }
