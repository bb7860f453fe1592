"""starVLA as stages over buffers."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from innerloop.blocks import qwen3_answer, qwen3_vl
from innerloop.blocks.qwen3_vl import LANGUAGE_READS
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.kernels import skinny
from innerloop.policies.starvla.config import LAYERWISE, StarVlaConfig
from innerloop.policies.starvla.model import StarVla

Tensors = Mapping[str, torch.Tensor]
STEP = 64  # tokens between two captured capacities
LEAST_TEXT = 48  # tokens of the shortest prompt worth a capacity: chat marks and a few words


def build(model: StarVla, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan a sequence capacity, images included, over the same buffers."""
    config = model.config
    sizes, slots = config.vlm, config.slots
    shared = [
        qwen3_vl.grid_stage(model.backbone.vision, slots),
        qwen3_vl.layout_stage(sizes.language, slots, sizes.vision.merge),
        qwen3_vl.vision_stage(model.backbone.vision, slots),
    ]
    listed = [*qwen3_vl.buffers(sizes, slots, batch, dtype), *_buffers(config, batch, dtype)]
    ticks = {**qwen3_vl.TICKS, "noise": "step"}
    ticks |= {"state": "observation"} if config.state_token else {}
    ticks |= {"query_rows": "prompt"} if config.framework == "QwenOFT" else {}
    before, after = _around(model)
    return {
        capacity: Plan(
            f"starvla-{config.framework.lower()}-{capacity}",
            {b.name: b for b in listed},
            (*before, *shared, _context(model, capacity), *after),
            ticks,
            fingerprint,
        )
        for capacity in capacities(config)
    }


def _around(model: StarVla) -> tuple[list[Stage], list[Stage]]:
    """The stages before and after those of the backbone."""
    config = model.config
    if config.dit is not None:
        state = [_state_stage(model)] if config.state_token else []
        return [_tables_stage(model)], [*state, _action_stage(model)]
    return [], [_regression_stage(model) if config.framework == "QwenOFT" else _answer_stage(model)]


def _context(model: StarVla, capacity: int) -> Stage:
    if model.config.framework != "QwenFast":
        return _context_stage(model, capacity)
    return qwen3_answer.context_stage(model.backbone.language, model.vocabulary, capacity)


def _answer_stage(model: StarVla) -> Stage:
    config = model.config
    return qwen3_answer.answer_stage(model.backbone.language, model.vocabulary, config.slots, config.answer)


def capacities(config: StarVlaConfig) -> tuple[int, ...]:
    """Multiples of 64, from what images and a short prompt take up to all there is room for."""
    least = config.slots.image_tokens(config.rules.merge) + LEAST_TEXT
    return tuple(range(-(-least // STEP) * STEP, config.slots.tokens + 1, STEP))


def _buffers(config: StarVlaConfig, batch: int, dtype: torch.dtype) -> list[Buffer]:
    c, f32, width = config, torch.float32, config.vlm.language.width
    action = (batch, c.chunk, c.max_action_dim)
    noise = Buffer("noise", action, f32, Role.INPUT)  # the heads without a solver have it too, unread
    if c.framework == "QwenFast":
        return [noise, *qwen3_answer.buffers(c.vlm.language, c.slots, c.answer, batch, dtype)]
    ends = [noise, Buffer("actions", action, f32, Role.OUTPUT)]
    if c.dit is None:
        rows = Buffer("query_rows", (batch, c.chunk), torch.int32, Role.INPUT)
        return [*ends, rows, Buffer("queries", (batch, c.chunk, width), dtype, Role.STATE)]
    tables = [
        Buffer("modulation", (c.steps, c.dit.table_rows, 2, c.dit.width), f32, Role.STATIC),
        Buffer("time_mix", (c.steps, c.dit.width), f32, Role.STATIC),
    ]
    memory = Buffer("memory", c.dit.memory_shape(batch, c.slots.tokens), dtype, Role.STATE)
    state = [
        Buffer("state", (batch, c.state_dim), f32, Role.INPUT),
        Buffer("state_token", (batch, 1, c.dit.width), dtype, Role.STATE),
    ]
    return [*ends, *tables, memory, *(state if c.state_token else [])]


def _tables_stage(model: StarVla) -> Stage:
    def run(b: Tensors) -> None:
        modulation, mix = model.head.tables()
        b["modulation"].copy_(modulation)
        b["time_mix"].copy_(mix)

    return Stage("tables", run, (), ("modulation", "time_mix"), prepare=True)


def _context_stage(model: StarVla, capacity: int) -> Stage:
    """Tokens and visual tokens -> what the head reads of the language model's layers."""
    config, language = model.config, model.backbone.language

    def layerwise(b: Tensors) -> None:
        assert config.dit is not None
        read = [x for i, x in enumerate(qwen3_vl.outputs(b, language, capacity)) if config.dit.crosses(i)]
        if hasattr(model, "projections"):
            contexts = model.projections(torch.stack([model.projections.normed(i, x) for i, x in enumerate(read)]))
        else:
            contexts = torch.stack(read)
        model.head.dit.remember(contexts, b["memory"])

    def last(b: Tensors) -> None:
        hidden = deque(qwen3_vl.outputs(b, language, capacity), maxlen=1).pop()
        if config.dit is not None:
            model.head.dit.remember(hidden, b["memory"])
            return
        rows = b["query_rows"].long()[..., None].expand(-1, -1, hidden.shape[-1])
        b["queries"].copy_(hidden.gather(1, rows))

    run = layerwise if config.framework in LAYERWISE else last
    reads = LANGUAGE_READS if config.dit is not None else (*LANGUAGE_READS, "query_rows")
    return Stage("context", run, reads, ("queries",) if config.dit is None else ("memory",))


def _state_stage(model: StarVla) -> Stage:
    def run(b: Tensors) -> None:
        b["state_token"].copy_(model.head.state_token(b["state"]))

    return Stage("state_encoder", run, ("state",), ("state_token",))


def _action_stage(model: StarVla) -> Stage:
    """Noise -> actions, all solver steps."""
    config, head = model.config, model.head
    state = ("state_token",) if config.state_token else ()

    def run(b: Tensors) -> None:
        x, prefix = b["noise"], head.prefix(b["state_token"] if state else None, len(b["noise"]))
        with skinny.chain():
            for step in range(config.steps):
                tables = (b["modulation"][step], b["time_mix"][step])
                x = head.denoise(x, prefix, tables, b["memory"], b["key_valid"])
        b["actions"].copy_(x)

    reads = ("noise", "memory", "key_valid", "modulation", "time_mix", *state)
    return Stage("action", run, reads, ("actions",))


def _regression_stage(model: StarVla) -> Stage:
    """Hidden states of the placeholder tokens -> actions; nothing is sampled."""

    def run(b: Tensors) -> None:
        b["actions"].copy_(model.regression(b["queries"]))

    return Stage("action", run, ("queries",), ("actions",))


def sample(config: StarVlaConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use a plan to its full."""
    rng, first = np.random.default_rng(1), capacity - config.chunk
    inputs = qwen3_vl.sample(config.vlm, config.slots, batch, capacity)
    inputs["noise"] = rng.standard_normal((batch, config.chunk, config.max_action_dim), dtype=np.float32)
    if config.state_token:
        inputs["state"] = rng.uniform(-1, 1, (batch, config.state_dim)).astype(np.float32)
    if config.framework == "QwenOFT":
        inputs["query_rows"] = np.broadcast_to(np.arange(first, capacity, dtype=np.int32), (batch, config.chunk)).copy()
    return inputs
