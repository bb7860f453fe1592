"""starVLA as stages over buffers: those of Qwen3-VL, and those of the head that a run has."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from innerloop.blocks import dit_head, qwen3_answer, qwen3_vl, regression
from innerloop.blocks.qwen3_vl import LANGUAGE_READS, Tensors
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.kernels import skinny
from innerloop.policies.starvla.config import ANSWER, STEP, StarVlaConfig
from innerloop.policies.starvla.model import FlowHead, StarVla

TICKS = {**qwen3_vl.TICKS, **regression.TICKS, "state": "observation", "noise": "step"}
LEAST_TEXT = 48  # tokens of the shortest prompt worth a capacity: chat marks and a few words


def build(model: StarVla, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan a sequence capacity, images included, over the same buffers."""
    config, sizes, slots = model.config, model.config.vlm, model.config.slots
    listed = [*qwen3_vl.buffers(sizes, slots, batch, dtype), *_buffers(config, batch, dtype)]
    buffers = {buffer.name: buffer for buffer in listed}
    ticks = {name: tick for name, tick in TICKS.items() if name in buffers}
    shared = (
        qwen3_vl.grid_stage(model.backbone.vision, slots),
        qwen3_vl.layout_stage(sizes.language, slots, sizes.vision.merge),
        qwen3_vl.resize_stage(sizes.vision, slots),
        qwen3_vl.vision_stage(model.backbone.vision),
    )
    before, after = _around(model)
    plans = {}
    for capacity in capacities(config):
        stages = (*before, *shared, _context_stage(model, capacity), *after)
        name = f"starvla-{config.framework.lower()}-{capacity}"
        plans[capacity] = Plan(name, buffers, stages, ticks, fingerprint)
    return plans


def capacities(config: StarVlaConfig) -> tuple[int, ...]:
    """Multiples of 64, from what images and a short prompt take up to all there is room for."""
    least = config.slots.image_tokens(config.rules.merge) + LEAST_TEXT
    return tuple(range(-(-least // STEP) * STEP, config.slots.tokens + 1, STEP))


def _buffers(c: StarVlaConfig, batch: int, dtype: torch.dtype) -> list[Buffer]:
    """Those of the head. The heads without a solver have noise too, unread."""
    action, f32 = (batch, c.chunk, c.max_action_dim), torch.float32
    noise = Buffer("noise", action, f32, Role.INPUT)
    if c.framework == "QwenFast":
        return [noise, *qwen3_answer.buffers(c.vlm.language, c.slots, ANSWER, batch, dtype)]
    ends = [noise, Buffer("actions", action, f32, Role.OUTPUT)]
    if c.dit is None:
        return [*ends, *regression.buffers(c.chunk, c.vlm.language.width, batch, dtype)]
    tables = dit_head.table_buffers(c.dit, c.steps, c.max_action_dim, c.hidden, dtype)
    state = dit_head.state_buffers(c.dit, batch, c.state_dim, dtype) if c.state_token else []
    return [*ends, *tables, dit_head.memory_buffer(c.dit, batch, c.slots.tokens, dtype), *state]


def _around(model: StarVla) -> tuple[Sequence[Stage], Sequence[Stage]]:
    """The stages before and after those of the backbone."""
    config = model.config
    if config.framework == "QwenFast":
        language = model.backbone.language
        return (), (qwen3_answer.answer_stage(language, model.vocabulary, config.slots, ANSWER),)
    if config.framework == "QwenOFT":
        return (), (regression.action_stage(model.regression),)
    head = model.head
    state = (dit_head.state_stage(lambda b: head.weights),) if config.state_token else ()
    return (dit_head.tables_stage(head.tables, dit_head.TABLES),), (*state, _action_stage(head))


def _context_stage(model: StarVla, capacity: int) -> Stage:
    """Tokens and visual tokens -> what the head reads of the language model's layers."""
    language = model.backbone.language
    if model.config.framework == "QwenFast":
        return qwen3_answer.context_stage(language, model.vocabulary, capacity)
    if model.config.framework == "QwenOFT":
        return regression.context_stage(language, capacity)
    head = model.head

    def run(b: Tensors) -> None:
        head.dit.remember(head.contexts(qwen3_vl.outputs(b, language, capacity)), b["memory"])

    return Stage("context", run, LANGUAGE_READS, ("memory",))


def _action_stage(head: FlowHead) -> Stage:
    """Noise -> actions, all solver steps."""
    state = ("state_token",) if head.config.state_token else ()

    def run(b: Tensors) -> None:
        x, weights = b["noise"], {**head.weights, **{name: b[name] for name in dit_head.TABLES}}
        ground = dit_head.ground(weights, head.prefix(b["state_token"] if state else None, len(x)), *x.shape[:2])
        with skinny.chain():
            for step in range(head.config.steps):
                x = dit_head.step(head.dit, weights, step, x, ground, b["memory"], b["key_valid"])
        b["actions"].copy_(x)

    return Stage("action", run, ("noise", "memory", "key_valid", *dit_head.TABLES, *state), ("actions",))


def sample(config: StarVlaConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use a plan to its full."""
    rng, first = np.random.default_rng(1), capacity - config.chunk
    inputs = qwen3_vl.sample(config.vlm, config.slots, batch, capacity)
    inputs["noise"] = rng.standard_normal((batch, config.chunk, config.max_action_dim), dtype=np.float32)
    if config.state_token:
        inputs["state"] = rng.uniform(-1, 1, (batch, config.state_dim)).astype(np.float32)
    if config.framework == "QwenOFT":
        inputs["query_rows"] = np.tile(np.arange(first, capacity, dtype=np.int32), (batch, 1))
    return inputs
