"""GR00T N1.7 as stages over buffers; state, features and their K/V run once an observation, not once a step."""

from typing import Any

import numpy as np
import torch

from innerloop.blocks import dit_head, flow_plan, qwen3_vl
from innerloop.blocks.qwen3_vl import Tensors
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.policies.groot.config import GrootConfig
from innerloop.policies.groot.model import Groot, static_buffers

TICKS = {**qwen3_vl.TICKS, "state": "observation", "noise": "step", "previous": "step", "guidance": "step"}
TEXTS = (32, 64)  # room for text in plans below the largest


def build(model: Groot, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan a sequence capacity, over the same buffers."""
    config, slots, b, f32 = model.config, model.config.slots, batch, torch.float32
    static, action = static_buffers(model, dtype), (b, config.chunk, config.max_action_dim)
    names = tuple(buffer.name for buffer in static)
    listed = [
        *qwen3_vl.buffers(config.backbone, slots, batch, dtype),
        *(Buffer(name, action, f32, Role.INPUT) for name in ("noise", "previous")),
        Buffer("guidance", (b, config.chunk), f32, Role.INPUT),
        *static,
        *(Buffer(name, (b, slots.tokens), torch.int32, Role.STATE) for name in ("text_valid", "image_valid")),
        *dit_head.state_buffers(config.dit, b, config.max_state_dim, dtype),
        dit_head.memory_buffer(config.dit, b, slots.tokens, dtype),
        Buffer("actions", action, f32, Role.OUTPUT),
    ]
    before = (
        dit_head.tables_stage(model.tables, names),
        qwen3_vl.grid_stage(model.backbone.vision, slots),
        qwen3_vl.layout_stage(config.backbone.language, slots, config.backbone.vision.merge),
        _masks_stage(),
        qwen3_vl.resize_stage(config.vision, slots),
        qwen3_vl.vision_stage(model.backbone.vision),
    )
    after = (dit_head.state_stage(lambda b: b, dit_head.STATE_READS), _action_stage(model, names))
    buffers = {buffer.name: buffer for buffer in listed}
    return {
        rows: Plan(f"groot-{rows}", buffers, (*before, _context_stage(model, rows), *after), TICKS, fingerprint)
        for rows in capacities(config)
    }


def capacities(config: GrootConfig) -> tuple[int, ...]:
    """Tokens of each plan: every image and the chat's own tokens, and some room for text."""
    images = config.slots.tokens - config.text_capacity
    return tuple(images + text for text in flow_plan.capacities(config.text_capacity, TEXTS))


def _masks_stage() -> Stage:
    def run(b: Tensors) -> None:
        image = b["visual_rows"] >= 0
        b["image_valid"].copy_(b["key_valid"] * image)
        b["text_valid"].copy_(b["key_valid"] * ~image)

    return Stage("masks", run, ("visual_rows", "key_valid"), ("text_valid", "image_valid"))


def _context_stage(model: Groot, rows: int) -> Stage:
    def run(b: Tensors) -> None:
        x = qwen3_vl.last(qwen3_vl.outputs(b, model.backbone.language, rows))
        model.dit.remember(model.refine(x, b["key_valid"][:, :rows].contiguous()), b["memory"])

    return Stage("context", run, qwen3_vl.LANGUAGE_READS, ("memory",))


def _action_stage(model: Groot, static: tuple[str, ...]) -> Stage:
    config, masks = model.config, model.config.masks
    read = tuple(name for name in static if not name.startswith("state_"))

    def run(b: Tensors) -> None:
        weights = {**{name: b[name] for name in read}, "place": model.place}
        valid, hold = [b[name] for name in masks], b["guidance"]
        x = torch.where(hold[..., None] > 0, b["previous"], b["noise"])
        ground = dit_head.ground(weights, b["state_token"], *x.shape[:2])
        for step in range(config.steps):
            x = model.denoise(x, step, ground, b["memory"], valid, weights, hold)
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
