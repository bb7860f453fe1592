"""pi0.5 as stages over buffers."""

from typing import Any

import torch

from innerloop.blocks import flow, flow_plan
from innerloop.blocks.expert import Cache
from innerloop.blocks.flow_config import FlowConfig
from innerloop.blocks.flow_plan import Tensors
from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.kernels import euler, skinny
from innerloop.policies.pi05.model import Pi05

CAPACITIES = (64, 128)  # prompt tokens captured below the checkpoint's own capacity


def build(model: Pi05, batch: int, dtype: torch.dtype, fingerprint: str) -> dict[int, Plan]:
    """One plan a prompt capacity, over the same buffers."""
    config, layout = model.config, model.config.layout(state_tokens=0)
    shape = flow_plan.Shape(config, layout, batch, dtype)
    table = (config.steps + 1, 2 * config.expert.depth + 1, 3, config.expert.width)
    listed = [
        *flow_plan.buffers(shape),
        Buffer("modulation", table, torch.float32, Role.STATIC),
        *flow_plan.cache_buffers(shape, "cache"),
    ]
    tables = Stage("tables", lambda b: _write(b, "modulation", model.tables()), (), ("modulation",), prepare=True)
    shared = (
        flow_plan.layout_stage(layout),
        flow_plan.prompt_stage(model.language),
        flow_plan.vision_stage(shape, model.vision),
    )
    action = _action_stage(model, layout.prefix)
    return {
        capacity: Plan(
            f"pi05-{capacity}",
            {b.name: b for b in listed},
            (tables, *shared, flow_plan.context_stage(layout, model.language, capacity), action),
            flow_plan.TICKS,
            fingerprint,
        )
        for capacity in flow_plan.capacities(config.prompt_capacity, CAPACITIES)
    }


def _action_stage(model: Pi05, start: int) -> Stage:
    config = model.config

    def run(b: Tensors) -> None:
        cache = Cache(*flow_plan.start_cache(b, "cache", start), b["key_valid"])
        rotary = flow_plan.suffix_rotary(b, start, config.chunk)
        chunk = (b["previous"], b["guidance"], b["prefix_length"])
        x = euler.impose(b["noise"], b["previous"], b["prefix_length"])
        with skinny.chain():
            for step in range(config.steps):
                pull = flow.guided(*chunk, step, config.steps)
                x = model.denoise(x, flow.at_step(b["modulation"], step), cache, rotary, start, pull)
        b["actions"].copy_(x)

    reads = (
        *("noise", "previous", "guidance", "prefix_length", "keys", "values"),
        *("key_valid", "rotary_cos", "rotary_sin", "modulation"),
    )
    return Stage("action", run, reads, ("actions", "cache_keys", "cache_values"))


def _write(b: Tensors, name: str, value: torch.Tensor) -> None:
    b[name].copy_(value)


def sample(config: FlowConfig, batch: int, capacity: int) -> dict[str, Any]:
    """Made-up inputs that use the plan to its full."""
    return flow_plan.sample(flow_plan.Shape(config, config.layout(0), batch, torch.float32), capacity)
