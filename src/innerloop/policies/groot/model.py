"""GR00T N1.7's parameters, in the fused layout that inference reads."""

from collections.abc import Mapping

import torch
from torch import nn

from innerloop.blocks import dit, flow
from innerloop.blocks.dit import DiT
from innerloop.blocks.embodiment import EmbodimentLinear
from innerloop.blocks.qwen3_vl import Qwen3VL
from innerloop.blocks.siglip import SiglipLayer
from innerloop.blocks.stack import Stack
from innerloop.kernels import activation, euler, linear, norm, skinny
from innerloop.policies.groot.config import GrootConfig

EPS = 1e-5  # torch.nn.LayerNorm and diffusers' default, which the action head leaves as they are
FLOAT32 = tuple(f"dit.{pattern}" for pattern in dit.FLOAT32)  # the rest is trained and served in bfloat16
# Layers of which a session reads one embodiment's slice as it is; those around the actions are folded first.
SLICED = ("state_in", "state_out", "action_out", "decode_in", "decode_out")

Weights = Mapping[str, torch.Tensor]  # static buffers by name


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
        self.dit = DiT(config.dit)

    def tables(self) -> dict[str, torch.Tensor]:
        """What depends on weights, embodiment and step index alone, by static buffer."""
        c, wide = self.config, self.config.dit.width
        times = flow.buckets(c.steps, c.buckets, self.place.device)
        mix, mix_bias = (part.double() for part in self.action_mix.of(c.embodiment))
        inner, inner_bias = (part.double() for part in self.action_in.of(c.embodiment))
        action_half, time_half = mix.tensor_split(2, dim=1)
        constant = action_half @ inner_bias + mix_bias
        found = {
            "modulation": self.dit.tables(times),
            # No activation stands between the action's projection and its half of the mixing product.
            "action_table": action_half @ inner,
            "time_table": flow.bucket_embedding(times, wide).double() @ time_half.T + constant,
        }
        for name in SLICED:
            found[f"{name}_weight"], found[f"{name}_bias"] = getattr(self, name).of(c.embodiment)
        return found

    def refine(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Features [B, T, D] of which `valid` int32 [B, T] count -> [B, T, D] that the actions attend to."""
        layers = list(self.refiner)
        x = norm.layer_norm(x, self.norm_weight, self.norm_bias, EPS)
        normed = norm.layer_norm(x, layers[0].norm1_weight, layers[0].norm1_bias, EPS)
        # After the last layer comes no norm: of its sum and norm only the sum is read.
        following = [(n.norm1_weight, n.norm1_bias) for n in layers[1:]] + [(None, None)]
        for layer, (weight, bias) in zip(layers, following, strict=True):
            delta, left = layer.attend(normed, valid)
            x, normed = norm.add_layer_norm(x, delta, layer.norm2_weight, layer.norm2_bias, EPS, left)
            delta, left = layer.mlp(normed)
            x, normed = norm.add_layer_norm(x, delta, weight, bias, EPS, left)
        return x

    def state_token(self, state: torch.Tensor, w: Weights) -> torch.Tensor:
        """Normalised state [B, S] -> [B, 1, D]."""
        x = state[:, None].to(self.place.dtype)
        hidden = linear.linear(x, w["state_in_weight"], w["state_in_bias"], activation="relu")
        return linear.linear(hidden, w["state_out_weight"], w["state_out_bias"])

    def denoise(
        self,
        x: torch.Tensor,
        step: int,
        state: torch.Tensor,
        memory: torch.Tensor,
        valid: list[torch.Tensor],
        w: Weights,
    ) -> torch.Tensor:
        """One Euler step: x float32 [B, chunk, A], state [B, 1, D], valid: a mask a cross block -> x at the next time."""
        hidden = activation.silu(skinny.project_in(x, w["action_table"], w["time_table"][step], state.dtype))
        actions = linear.linear(hidden, w["action_out_weight"], w["action_out_bias"]) + self.place[: x.shape[1]]
        out = self.dit(torch.cat([state, actions], dim=1), w["modulation"][step], memory, valid)
        hidden = linear.linear(out[:, 1:], w["decode_in_weight"], w["decode_in_bias"], activation="relu")
        return euler.project_and_step(hidden, w["decode_out_weight"], w["decode_out_bias"], x, 1.0 / self.config.steps)


def table_shapes(model: Groot, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each of `Groot.tables`."""
    c, wide, full = model.config, model.config.dit.width, torch.float32
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "modulation": ((c.steps, c.dit.table_rows, 2, wide), full),
        "action_table": ((wide, c.max_action_dim), full),
        "time_table": ((c.steps, wide), full),
    }
    for name in SLICED:
        _, inner, out = getattr(model, name).weight.shape
        kind = full if name == "decode_out" else dtype
        found |= {f"{name}_weight": ((out, inner), kind), f"{name}_bias": ((out,), kind)}
    return found
