"""pi0.5's parameters, in the fused layout that inference reads."""

import torch
from torch import nn

from innerloop.blocks import flow
from innerloop.blocks.expert import EPS, ActionExpert, Cache, Modulation
from innerloop.blocks.flow_config import FlowConfig
from innerloop.blocks.gemma import GemmaPrefix
from innerloop.blocks.siglip import Siglip
from innerloop.kernels import activation, linear, skinny
from innerloop.kernels.euler import Guide

# Read in float32 at any precision: norms, time and action heads (openpi keeps them so).
FLOAT32 = ("*norm*", "modulation_*", "action_*", "time_*")


class Pi05(nn.Module):
    """SigLIP, Gemma prefix, action expert with modulated norms, action and time heads."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width, norms = config.expert.width, 2 * config.expert.depth + 1
        self.config = config
        self.vision = Siglip(config.vision, config.language.width)
        self.language = GemmaPrefix(config.language)
        self.expert = ActionExpert(config.expert)
        self.modulation_weight = nn.Parameter(torch.empty(norms * 3 * width, width))
        self.modulation_bias = nn.Parameter(torch.empty(norms * 3 * width))
        self.time_in_weight = nn.Parameter(torch.empty(width, width))
        self.time_in_bias = nn.Parameter(torch.empty(width))
        self.time_out_weight = nn.Parameter(torch.empty(width, width))
        self.time_out_bias = nn.Parameter(torch.empty(width))
        self.action_in_weight = nn.Parameter(torch.empty(width, config.max_action_dim))
        self.action_in_bias = nn.Parameter(torch.empty(width))
        self.action_out_weight = nn.Parameter(torch.empty(config.max_action_dim, width))
        self.action_out_bias = nn.Parameter(torch.empty(config.max_action_dim))

    def tables(self) -> torch.Tensor:
        """float32 [steps + 1, norms, 3, width]: scale, shift and gate of every norm at every step and the clean end."""
        steps, width = self.config.steps, self.config.expert.width
        time = flow.time_embedding(steps, width, self.config.periods, self.time_in_weight.device)
        hidden = activation.silu(linear.linear(time, self.time_in_weight, self.time_in_bias))
        condition = activation.silu(linear.linear(hidden, self.time_out_weight, self.time_out_bias))
        table = linear.linear(condition, self.modulation_weight, self.modulation_bias)
        return table.view(steps + 1, -1, 3, width)

    def denoise(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        cache: Cache,
        rotary: tuple[torch.Tensor, torch.Tensor],
        start: int,
        guide: Guide,
    ) -> torch.Tensor:
        """One Euler step: x float32 [B, chunk, A], table [2, norms, 3, width] (flow.at_step) -> x at the next time."""
        norms = [Modulation(*norm.unbind(1)) for norm in table.unbind(1)]
        hidden = skinny.project_in(x, self.action_in_weight, self.action_in_bias, cache.keys.dtype)
        hidden = self.expert(hidden, norms[:-1], cache, rotary, start, guide.prefix)
        out = (self.action_out_weight, self.action_out_bias)
        scale, shift, _ = table[0, -1].unbind(0)  # of given rows nothing is asked here
        return skinny.norm_project_step(hidden, scale, shift, EPS, *out, x, -1.0 / self.config.steps, guide)
