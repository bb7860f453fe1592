"""GR00T N1.7's parameters, in the fused layout that inference reads."""

import torch
from torch import nn

from innerloop.blocks import dit, dit_head, flow, siglip
from innerloop.blocks.dit import DiT
from innerloop.blocks.embodiment import EmbodimentLinear
from innerloop.blocks.qwen3_vl import Qwen3VL
from innerloop.blocks.siglip import SiglipLayer
from innerloop.blocks.stack import Stack
from innerloop.contract import Buffer, Role
from innerloop.kernels import norm
from innerloop.policies.groot.config import GrootConfig

EPS = 1e-5  # torch.nn.LayerNorm and diffusers' default, which the action head leaves as they are
FLOAT32 = tuple(f"dit.{pattern}" for pattern in dit.FLOAT32)  # the rest is trained and served in bfloat16
# Layers of which a session reads one embodiment's slice as it is; those around the actions are folded first.
SLICED = (*dit_head.STATE, "action_out", "decode_out")


class Groot(nn.Module):
    """Qwen3-VL, the refiner of its features, per-embodiment encoders and decoder, the diffusion transformer."""

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        c, wide, many = config, config.dit.width, config.embodiments
        self.config = config
        self.backbone = Qwen3VL(config.backbone)
        self.norm_weight = nn.Parameter(torch.empty(config.refiner.hidden_size))
        self.norm_bias = nn.Parameter(torch.empty(config.refiner.hidden_size))
        self.refiner = Stack([SiglipLayer(config.refiner) for _ in range(config.refiner.layers)])
        self.state_in = EmbodimentLinear(many, c.max_state_dim, c.hidden)
        self.state_out = EmbodimentLinear(many, c.hidden, wide)
        self.action_in = EmbodimentLinear(many, c.max_action_dim, wide)
        self.action_mix = EmbodimentLinear(many, 2 * wide, wide)
        self.action_out = EmbodimentLinear(many, wide, wide)
        self.decode_in = EmbodimentLinear(many, c.dit.output, c.hidden)
        self.decode_out = EmbodimentLinear(many, c.hidden, c.max_action_dim)
        self.place = nn.Parameter(torch.empty(c.places, wide))
        self.dit = DiT(config.dit)  # dense: 41 rows of 1536 took the few-row kernels 73 us a layer (docs/LOG.md)

    def tables(self) -> dict[str, torch.Tensor]:
        """What depends on weights, embodiment and step index alone, by static buffer."""
        c = self.config
        times = flow.buckets(c.steps, c.buckets, self.place.device)
        inner, mix, decoder = (layer.of(c.embodiment) for layer in (self.action_in, self.action_mix, self.decode_in))
        found = dit_head.tables(self.dit, times, inner, mix, decoder)
        for name in SLICED:
            found[f"{name}_weight"], found[f"{name}_bias"] = getattr(self, name).of(c.embodiment)
        return found

    def refine(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Features [B, T, D] of which `valid` int32 [B, T] count -> [B, T, D] that the actions attend to."""
        first = self.refiner[0]
        x = norm.layer_norm(x, self.norm_weight, self.norm_bias, EPS)
        normed = norm.layer_norm(x, first.norm1_weight, first.norm1_bias, EPS)
        return siglip.encoded(self.refiner, x, normed, EPS, lambda layer, y: layer.attend(y, valid))[0]

    def denoise(
        self,
        x: torch.Tensor,
        step: int,
        ground: torch.Tensor,
        memory: torch.Tensor,
        valid: list[torch.Tensor],
        static: dit_head.Weights,
        hold: torch.Tensor,
    ) -> torch.Tensor:
        """One Euler step: x float32 [B, chunk, A], ground of `dit_head.ground`, valid: a mask a cross block, hold [B, chunk]:
        how much of x a row keeps -> x at the next time.
        """
        return dit_head.step(self.dit, static, step, x, ground, memory, valid, hold)


def static_buffers(model: Groot, dtype: torch.dtype) -> list[Buffer]:
    """Buffers of `Groot.tables`."""
    c = model.config
    found = dit_head.table_buffers(c.dit, c.steps, c.max_action_dim, c.hidden, dtype)
    for name in SLICED:
        _, inner, out = getattr(model, name).weight.shape
        kind = torch.float32 if name == "decode_out" else dtype
        found.append(Buffer(f"{name}_weight", (out, inner), kind, Role.STATIC))
        found.append(Buffer(f"{name}_bias", (out,), kind, Role.STATIC))
    return found
