"""pi0's parameters, in the fused layout that inference reads."""

from dataclasses import dataclass

import torch
from torch import nn

from innerloop.blocks import flow
from innerloop.blocks.expert import EPS, ActionExpert, Cache, Modulation
from innerloop.blocks.flow_config import FlowConfig
from innerloop.blocks.gemma import GemmaPrefix
from innerloop.blocks.siglip import Siglip
from innerloop.kernels import activation, linear, skinny
from innerloop.kernels.euler import Guide

# Read in float32 at any precision: norms, state, time and action heads (openpi keeps them so).
FLOAT32 = ("*norm*", "state_*", "action_*", "mix_*")


@dataclass(frozen=True)
class Tables:
    """What the solver reads that depends on weights and step index alone, float32."""

    time: torch.Tensor  # [steps + 1, width]: the time half of the mixing MLP's first product, biases included
    action: torch.Tensor  # [width, A]: action projection folded into the action half of that product


class Pi0(nn.Module):
    """SigLIP, Gemma prefix, action expert with plain norms, state and action heads."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        width = config.expert.width
        self.config = config
        self.vision = Siglip(config.vision, config.language.width)
        self.language = GemmaPrefix(config.language)
        self.expert = ActionExpert(config.expert)
        self.expert_norms = nn.Parameter(torch.empty((2 * config.expert.depth + 1) * width))
        self.state_weight = nn.Parameter(torch.empty(width, config.max_state_dim))
        self.state_bias = nn.Parameter(torch.empty(width))
        self.action_in_weight = nn.Parameter(torch.empty(width, config.max_action_dim))
        self.action_in_bias = nn.Parameter(torch.empty(width))
        self.mix_in_weight = nn.Parameter(torch.empty(width, 2 * width))
        self.mix_in_bias = nn.Parameter(torch.empty(width))
        self.mix_out_weight = nn.Parameter(torch.empty(width, width))
        self.mix_out_bias = nn.Parameter(torch.empty(width))
        self.action_out_weight = nn.Parameter(torch.empty(config.max_action_dim, width))
        self.action_out_bias = nn.Parameter(torch.empty(config.max_action_dim))

    def norms(self) -> list[Modulation]:
        """Plain norms: 2 a layer and the final one."""
        return [Modulation(row) for row in self.expert_norms.view(-1, self.config.expert.width).unbind(0)]

    def tables(self) -> Tables:
        """What depends on weights and step index alone (flow.folded)."""
        width = self.config.expert.width
        time = flow.time_embedding(self.config.steps, width, self.config.periods, self.mix_in_weight.device)
        inner, mix = (self.action_in_weight, self.action_in_bias), (self.mix_in_weight, self.mix_in_bias)
        added, action = flow.folded(time, inner, mix)
        return Tables(added.float(), action.float())

    def state_pass(
        self, state: torch.Tensor, cache: Cache, rotary: tuple[torch.Tensor, torch.Tensor], start: int
    ) -> None:
        """The state token sees prefix and itself: its K/V land in cache row `start`, once an observation."""
        token = linear.linear(state, self.state_weight, self.state_bias)[:, None].to(cache.keys.dtype)
        self.expert(token, self.norms()[:-1], cache, rotary, start)

    def denoise(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
        rotary: tuple[torch.Tensor, torch.Tensor],
        start: int,
        guide: Guide,
    ) -> torch.Tensor:
        """One Euler step: x float32 [B, chunk, A], tables (time [2, width], action [width, A]) -> x at the next time.

        time: see flow.at_step.
        """
        time, action = tables
        mixed = activation.activate(linear.linear(x, action), "silu", time, guide.prefix)
        hidden = linear.linear(mixed, self.mix_out_weight, self.mix_out_bias).to(cache.keys.dtype)
        norms = self.norms()
        hidden = self.expert(hidden, norms[:-1], cache, rotary, start)
        out = (self.action_out_weight, self.action_out_bias)
        return skinny.norm_project_step(hidden, norms[-1].scale, None, EPS, *out, x, -1.0 / self.config.steps, guide)
