"""GR00T N1.7 as stages over buffers; state, features and their K/V run once an observation, not once a step."""

from typing import Any

import numpy as np
import torch

from innerloop.blocks import qwen3_vl
from innerloop.blocks.qwen3_vl import Tensors
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.policies.groot.config import GrootConfig
from innerloop.policies.groot.model import Groot, Weights, table_shapes

TICKS = {**qwen3_vl.TICKS, "state": "observation", "noise": "step", "previous": "step", "guidance": "step"}
TEXTS = (32, 64)  # room for text in plans below the largest


def build(model: Groot, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan a sequence capacity, over the same buffers."""
    config, slots, b, f32 = model.config, model.config.slots, batch, torch.float32
    language, shapes = config.backbone.language, table_shapes(model, dtype)
    mask = ((b, slots.tokens), torch.int32)
    listed = [
        *qwen3_vl.buffers(config.backbone, slots, batch, dtype),
        Buffer("state", (b, config.max_state_dim), f32, Role.INPUT),
        *(Buffer(name, (b, config.chunk, config.max_action_dim), f32, Role.INPUT) for name in ("noise", "previous")),
        Buffer("guidance", (b, config.chunk), f32, Role.INPUT),
        *(Buffer(name, shape, kind, Role.STATIC) for name, (shape, kind) in shapes.items()),
        Buffer("text_valid", *mask, Role.STATE),
        Buffer("image_valid", *mask, Role.STATE),
        Buffer("memory", config.dit.memory_shape(b, slots.tokens), dtype, Role.STATE),
        Buffer("state_token", (b, 1, config.dit.width), dtype, Role.STATE),
        Buffer("actions", (b, config.chunk, config.max_action_dim), f32, Role.OUTPUT),
    ]
    before = (
        _tables_stage(model, tuple(shapes)),
        qwen3_vl.grid_stage(model.backbone.vision, slots),
        qwen3_vl.layout_stage(language, slots, config.backbone.vision.merge),
        _masks_stage(),
        qwen3_vl.vision_stage(model.backbone.vision, slots),
    )
    after = (_state_stage(model), _action_stage(model, tuple(shapes)))
    buffers = {buffer.name: buffer for buffer in listed}
    return {
        rows: Plan(f"groot-{rows}", buffers, (*before, _context_stage(model, rows), *after), TICKS, fingerprint)
        for rows in capacities(config)
    }


def capacities(config: GrootConfig) -> tuple[int, ...]:
    """Tokens of each plan: every image and the chat's own tokens, and some room for text."""
    images = config.slots.tokens - config.text_capacity
    return (*(images + text for text in TEXTS if text < config.text_capacity), config.slots.tokens)


def _tables_stage(model: Groot, names: tuple[str, ...]) -> Stage:
    def run(b: Tensors) -> None:
        for name, value in model.tables().items():
            b[name].copy_(value)

    return Stage("tables", run, (), names, prepare=True)


def _masks_stage() -> Stage:
    def run(b: Tensors) -> None:
        image = b["visual_rows"] >= 0
        b["image_valid"].copy_(b["key_valid"] * image)
        b["text_valid"].copy_(b["key_valid"] * ~image)

    return Stage("masks", run, ("visual_rows", "key_valid"), ("text_valid", "image_valid"))


def _context_stage(model: Groot, rows: int) -> Stage:
    def run(b: Tensors) -> None:
        for output in qwen3_vl.outputs(b, model.backbone.language, rows):
            x = output
        model.dit.remember(model.refine(x, b["key_valid"][:, :rows].contiguous()), b["memory"])

    return Stage("context", run, qwen3_vl.LANGUAGE_READS, ("memory",))


def _state_stage(model: Groot) -> Stage:
    reads = ("state_in_weight", "state_in_bias", "state_out_weight", "state_out_bias")

    def run(b: Tensors) -> None:
        b["state_token"].copy_(model.state_token(b["state"], {name: b[name] for name in reads}))

    return Stage("proprioception", run, ("state", *reads), ("state_token",))


def _action_stage(model: Groot, tables: tuple[str, ...]) -> Stage:
    config = model.config
    masks = config.masks
    read = tuple(name for name in tables if not name.startswith("state_"))

    def run(b: Tensors) -> None:
        weights: Weights = {name: b[name] for name in read}
        valid, hold = [b[name] for name in masks], b["guidance"][..., None]
        x = torch.where(hold > 0, b["previous"], b["noise"])
        for step in range(config.steps):
            moved = model.denoise(x, step, b["state_token"], b["memory"], valid, weights)
            x = torch.lerp(moved, x, hold)
        b["actions"].copy_(x)

    inputs = ("noise", "previous", "guidance", "state_token", "memory", *sorted({*masks}))
    return Stage("action", run, (*inputs, *read), ("actions",))


def sample(config: GrootConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use a plan to its full."""
    rng, rows = np.random.default_rng(1), (batch, config.chunk)
    noise, previous = rng.standard_normal((2, *rows, config.max_action_dim), dtype=np.float32)
    return {
        **qwen3_vl.sample(config.backbone, config.slots, batch, capacity),
        "state": rng.uniform(-1, 1, (batch, config.max_state_dim)).astype(np.float32),
        "noise": noise,
        "previous": previous,
        "guidance": np.linspace(1, 0, batch * config.chunk, dtype=np.float32).reshape(rows),
    }
