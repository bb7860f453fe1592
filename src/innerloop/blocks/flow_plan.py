"""The stages that every flow policy shares: layout, prompt, vision, context, and the buffers between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from innerloop.blocks import prefix
from innerloop.blocks.flow_config import FlowConfig
from innerloop.blocks.gemma import GemmaPrefix
from innerloop.blocks.siglip import Siglip
from innerloop.contract import Buffer, Role, Stage
from innerloop.kernels import embedding, image
from innerloop.process import FRAME_BYTES

Tensors = Mapping[str, torch.Tensor]

TICKS = {
    "frames": "observation",
    "frame_sizes": "observation",
    "camera_mask": "observation",
    "tokens": "prompt",
    "prompt_length": "prompt",
    "noise": "step",
    "previous": "step",
    "guidance": "step",
    "prefix_length": "step",
}


@dataclass(frozen=True)
class Shape:
    """What the buffers' shapes follow from."""

    config: FlowConfig
    layout: prefix.PrefixLayout
    batch: int
    dtype: torch.dtype


def buffers(shape: Shape) -> list[Buffer]:
    """Inputs, prefix state and outputs, in plan order."""
    c, p, b = shape.config, shape.layout, shape.batch
    half, kv = p.head_dim // 2, (c.language.kv_heads, c.language.head_dim)
    f32, i32 = torch.float32, torch.int32
    return [
        Buffer("frames", (b, p.cameras, FRAME_BYTES), torch.uint8, Role.INPUT),
        Buffer("frame_sizes", (b, p.cameras, 2), i32, Role.INPUT),
        Buffer("camera_mask", (b, p.cameras), i32, Role.INPUT),
        Buffer("tokens", (b, p.capacity), i32, Role.INPUT),
        Buffer("prompt_length", (b, 1), i32, Role.INPUT),
        Buffer("noise", (b, c.chunk, c.max_action_dim), f32, Role.INPUT),
        Buffer("previous", (b, c.chunk, c.max_action_dim), f32, Role.INPUT),
        Buffer("guidance", (b, c.chunk), f32, Role.INPUT),
        Buffer("prefix_length", (b, 1), i32, Role.INPUT),
        Buffer("key_valid", (b, p.keys), i32, Role.STATE),
        Buffer("positions", (b, p.keys), i32, Role.STATE),
        Buffer("rotary_cos", (b, p.keys, half), f32, Role.STATE),
        Buffer("rotary_sin", (b, p.keys, half), f32, Role.STATE),
        Buffer("prompt_tokens", (b, p.capacity, c.language.width), shape.dtype, Role.STATE),
        Buffer("image_tokens", (b, p.images, c.language.width), shape.dtype, Role.STATE),
        Buffer("keys", (c.language.depth, b, p.prefix, *kv), shape.dtype, Role.STATE),
        Buffer("values", (c.language.depth, b, p.prefix, *kv), shape.dtype, Role.STATE),
        Buffer("actions", (b, c.chunk, c.max_action_dim), f32, Role.OUTPUT),
    ]


def cache_buffers(shape: Shape, name: str) -> list[Buffer]:
    """Scratch K/V with room for the suffix: a stage appends to its own copy, so `keys` keeps one writer."""
    c, p = shape.config, shape.layout
    size = (c.language.depth, shape.batch, p.keys, c.language.kv_heads, c.language.head_dim)
    return [Buffer(f"{name}_{half}", size, shape.dtype, Role.SCRATCH) for half in ("keys", "values")]


def layout_stage(p: prefix.PrefixLayout) -> Stage:
    """Validity, positions and rotary angles from prompt length and camera mask."""

    def run(b: Tensors) -> None:
        valid = prefix.validity(p, b["camera_mask"], b["prompt_length"])
        position = prefix.positions(valid)
        cos, sin = prefix.rotary(position, p.head_dim, p.rotary_dtype)
        for name, value in (("key_valid", valid), ("positions", position), ("rotary_cos", cos), ("rotary_sin", sin)):
            b[name].copy_(value)

    return Stage(
        "layout", run, ("camera_mask", "prompt_length"), ("key_valid", "positions", "rotary_cos", "rotary_sin")
    )


def vision_stage(shape: Shape, vision: Siglip) -> Stage:
    """uint8 frames of any size -> image tokens."""
    sizes, dtype = shape.config.vision, shape.dtype

    def run(b: Tensors) -> None:
        patches = image.frames_to_patches(b["frames"], b["frame_sizes"], sizes.image_size, sizes.patch_size, dtype)
        b["image_tokens"].copy_(vision(patches))

    return Stage("vision", run, ("frames", "frame_sizes"), ("image_tokens",))


def prompt_stage(language: GemmaPrefix) -> Stage:
    """Token ids -> embeddings, over the largest capacity: a gather is cheaper than a second capture."""

    def run(b: Tensors) -> None:
        b["prompt_tokens"].copy_(embedding.embed(b["tokens"], language.embedding, language.embedding_scale))

    return Stage("prompt", run, ("tokens",), ("prompt_tokens",))


def context_stage(p: prefix.PrefixLayout, language: GemmaPrefix, capacity: int) -> Stage:
    """Image and prompt tokens -> K/V of every layer, over prompts of up to `capacity` tokens."""
    rows = p.images + capacity
    reads = ("image_tokens", "prompt_tokens", "key_valid", "rotary_cos", "rotary_sin")

    def run(b: Tensors) -> None:
        x = torch.cat([b["image_tokens"], b["prompt_tokens"][:, :capacity]], dim=1)
        cos, sin = b["rotary_cos"][:, :rows].contiguous(), b["rotary_sin"][:, :rows].contiguous()
        language(x, cos, sin, b["key_valid"][:, :rows].contiguous(), b["keys"], b["values"])

    return Stage("context", run, reads, ("keys", "values"))


def start_cache(b: Tensors, name: str, prefix_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the prefix's K/V into a stage's own cache; 13 MB at full size, some 9 us."""
    keys, values = b[f"{name}_keys"], b[f"{name}_values"]
    _words(keys[:, :, :prefix_rows]).copy_(_words(b["keys"]))
    _words(values[:, :, :prefix_rows]).copy_(_words(b["values"]))
    return keys, values


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as words of 16, where they divide so: a strided copy moves one element a thread and step."""
    return rows.view(torch.complex128) if rows.shape[-1] * rows.element_size() % 16 == 0 else rows


def suffix_rotary(b: Tensors, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of cache rows [start, start + rows)."""
    window = slice(start, start + rows)
    return b["rotary_cos"][:, window].contiguous(), b["rotary_sin"][:, window].contiguous()


def capacities(largest: int, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Prompt capacities to capture: the usual ones below the checkpoint's own, and that one."""
    return (*(c for c in usual if c < largest), largest)


def sample(shape: Shape, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use a plan to its full: 640x480 frames and a prompt of `capacity` tokens."""
    c, p, b = shape.config, shape.layout, shape.batch
    rng = np.random.default_rng(0)
    height, width = 480, 640
    return {
        "frames": [rng.integers(0, 256, height * width * 3, dtype=np.uint8) for _ in range(b * p.cameras)],
        "frame_sizes": np.full((b, p.cameras, 2), (height, width), np.int32),
        "camera_mask": np.ones((b, p.cameras), np.int32),
        "tokens": rng.integers(0, c.language.vocab_size, (b, p.capacity), dtype=np.int32),
        "prompt_length": np.full((b, 1), capacity, np.int32),
        "noise": rng.standard_normal((b, c.chunk, c.max_action_dim), dtype=np.float32),
        "previous": rng.standard_normal((b, c.chunk, c.max_action_dim), dtype=np.float32),
        "guidance": np.linspace(1, 0, b * c.chunk, dtype=np.float32).reshape(b, c.chunk),
        "prefix_length": (np.arange(b, dtype=np.int32)[:, None] + 1) % c.chunk,
    }
