"""pi0 as stages over buffers; the state token runs once an observation, not once a step."""

from typing import Any

import numpy as np
import torch

from innerloop.blocks import flow, flow_plan
from innerloop.blocks.expert import Cache
from innerloop.blocks.flow_config import FlowConfig
from innerloop.blocks.flow_plan import Tensors
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.kernels import euler, skinny
from innerloop.policies.pi0.model import Pi0


def build(model: Pi0, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan: pi0's prompts have a single small capacity."""
    config, layout = model.config, model.config.layout(state_tokens=1)
    shape = flow_plan.Shape(config, layout, batch, dtype)
    width = config.expert.width
    row = (config.expert.depth, batch, 1, config.expert.kv_heads, config.expert.head_dim)
    listed = [
        *flow_plan.buffers(shape),
        Buffer("state", (batch, config.max_state_dim), torch.float32, Role.INPUT),
        Buffer("time_table", (config.steps + 1, width), torch.float32, Role.STATIC),
        Buffer("action_table", (width, config.max_action_dim), torch.float32, Role.STATIC),
        Buffer("state_keys", row, dtype, Role.STATE),
        Buffer("state_values", row, dtype, Role.STATE),
        *flow_plan.cache_buffers(shape, "state_cache"),
        *flow_plan.cache_buffers(shape, "cache"),
    ]
    stages = (
        _tables_stage(model),
        flow_plan.layout_stage(layout),
        flow_plan.prompt_stage(model.language),
        flow_plan.vision_stage(shape, model.vision),
        flow_plan.context_stage(layout, model.language, config.prompt_capacity),
        _state_stage(model, layout.prefix),
        _action_stage(model, layout.prefix),
    )
    ticks = {**flow_plan.TICKS, "state": "observation"}
    name = f"pi0-{config.prompt_capacity}"
    return {config.prompt_capacity: Plan(name, {b.name: b for b in listed}, stages, ticks, fingerprint)}


def _tables_stage(model: Pi0) -> Stage:
    def run(b: Tensors) -> None:
        tables = model.tables()
        b["time_table"].copy_(tables.time)
        b["action_table"].copy_(tables.action)

    return Stage("tables", run, (), ("time_table", "action_table"), prepare=True)


def _state_stage(model: Pi0, row: int) -> Stage:
    def run(b: Tensors) -> None:
        keys, values = flow_plan.start_cache(b, "state_cache", row)
        seen = slice(0, row + 1)  # the state token comes before the actions and must not see them
        cache = Cache(keys[:, :, seen], values[:, :, seen], b["key_valid"][:, seen].contiguous())
        model.state_pass(b["state"], cache, flow_plan.suffix_rotary(b, row, 1), row)
        b["state_keys"].copy_(keys[:, :, row : row + 1])
        b["state_values"].copy_(values[:, :, row : row + 1])

    reads = ("state", "keys", "values", "key_valid", "rotary_cos", "rotary_sin")
    return Stage("proprioception", run, reads, ("state_keys", "state_values", "state_cache_keys", "state_cache_values"))


def _action_stage(model: Pi0, row: int) -> Stage:
    config, start = model.config, row + 1

    def run(b: Tensors) -> None:
        keys, values = flow_plan.start_cache(b, "cache", row)
        keys[:, :, row:start].copy_(b["state_keys"])
        values[:, :, row:start].copy_(b["state_values"])
        cache, rotary = Cache(keys, values, b["key_valid"]), flow_plan.suffix_rotary(b, start, config.chunk)
        chunk = (b["previous"], b["guidance"], b["prefix_length"])
        x = euler.impose(b["noise"], b["previous"], b["prefix_length"])
        with skinny.chain():
            for step in range(config.steps):
                tables = (flow.at_step(b["time_table"], step), b["action_table"])
                pull = flow.guided(*chunk, step, config.steps)
                x = model.denoise(x, tables, cache, rotary, start, pull)
        b["actions"].copy_(x)

    reads = (
        *("noise", "previous", "guidance", "prefix_length", "keys", "values", "state_keys", "state_values"),
        *("key_valid", "rotary_cos", "rotary_sin", "time_table", "action_table"),
    )
    return Stage("action", run, reads, ("actions", "cache_keys", "cache_values"))


def sample(config: FlowConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use the plan to its full."""
    shape = flow_plan.Shape(config, config.layout(1), batch, torch.float32)
    state = np.random.default_rng(1).standard_normal((batch, config.max_state_dim), dtype=np.float32)
    return {**flow_plan.sample(shape, capacity), "state": state}
