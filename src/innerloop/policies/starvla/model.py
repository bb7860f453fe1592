"""starVLA's parameters: Qwen3-VL below, one of three heads above."""

import torch
from torch import nn

from innerloop.blocks import dit, flow, qwen3
from innerloop.blocks.dit import DiT, DiTSizes
from innerloop.blocks.qwen3_vl import Qwen3VL
from innerloop.blocks.regression import RegressionHead
from innerloop.kernels import euler, linear, norm
from innerloop.policies.starvla.config import StarVlaConfig

EPS = 1e-5  # torch.nn.LayerNorm's default, as the projections have it
# Read in float32 at any precision: applied once a checkpoint, or around the solver's own values.
FLOAT32 = (*(f"head.dit.{name}" for name in dit.FLOAT32), "head.encode_in_*", "head.decode_out_*")


class Projections(nn.Module):
    """Layer norm and product of each layer's hidden states into the head's width (QwenPI_v3)."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        super().__init__()
        self.layers = layers
        self.norm_weight = nn.Parameter(torch.empty(layers * columns))
        self.norm_bias = nn.Parameter(torch.empty(layers * columns))
        self.weight, self.bias = _affine(layers * rows, columns)

    def normed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, columns] of one layer -> its layer norm."""
        weight, bias = (part.view(self.layers, -1)[layer] for part in (self.norm_weight, self.norm_bias))
        return norm.layer_norm(x, weight, bias, EPS)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """[layers, B, T, columns] -> [layers, B, T, rows]."""
        layers, batch, tokens, _ = normed.shape
        return dit.batched(normed.view(layers, batch * tokens, -1), self.weight, self.bias).view(
            layers, batch, tokens, -1
        )


class FlowHead(nn.Module):
    """Noise to actions through a DiT: QwenPI, QwenPI_v3 (a context a block) and QwenGR00T (one context)."""

    def __init__(self, config: StarVlaConfig, sizes: DiTSizes) -> None:
        super().__init__()
        width, hidden, dims = sizes.width, config.hidden, config.max_action_dim
        self.config, self.dit = config, DiT(sizes, config.head_tokens)
        self.encode_in_weight, self.encode_in_bias = _affine(width, dims)
        self.encode_mix_weight, self.encode_mix_bias = _affine(width, 2 * width)
        self.encode_out_weight, self.encode_out_bias = _affine(width, width)
        self.decode_in_weight, self.decode_in_bias = _affine(hidden, sizes.output or width)
        self.decode_out_weight, self.decode_out_bias = _affine(dims, hidden)
        if config.positions:
            self.position = nn.Parameter(torch.empty(config.positions, width))
        if config.tokens_mix:
            self.future = nn.Parameter(torch.empty(config.future_tokens, width))
        if config.state_token:
            self.state_in_weight, self.state_in_bias = _affine(hidden, config.state_dim)
            self.state_out_weight, self.state_out_bias = _affine(width, hidden)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Modulation float32 [steps, rows, 2, D], and time's share of the action encoder, float32 [steps, D]."""
        c, width = self.config, self.dit.sizes.width
        times = flow.buckets(c.steps, c.buckets, self.encode_mix_weight.device)
        waves = flow.bucket_embedding(times, width)
        mix = linear.linear(waves, self.encode_mix_weight[:, width:].float(), self.encode_mix_bias.float())
        return self.dit.tables(times), mix

    def state_token(self, state: torch.Tensor) -> torch.Tensor:
        """state float32 [B, state_dim] -> [B, 1, D]."""
        x = state[:, None].to(self.state_in_weight.dtype)
        hidden = linear.linear(x, self.state_in_weight, self.state_in_bias, activation="relu")
        return linear.linear(hidden, self.state_out_weight, self.state_out_bias)

    def prefix(self, state_token: torch.Tensor | None, batch: int) -> torch.Tensor | None:
        """What stands before the action tokens, [B, n, D]; None where no block lets one token see another.

        Then these tokens reach no action (starVLA computes them all the same: 32 rows beside the chunk's).
        """
        if not self.config.tokens_mix:
            return None
        future = self.future[None].expand(batch, -1, -1)
        return future if state_token is None else torch.cat([state_token, future], dim=1)

    def denoise(
        self,
        x: torch.Tensor,
        prefix: torch.Tensor | None,
        tables: tuple[torch.Tensor, torch.Tensor],
        memory: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """One Euler step upwards in time: x float32 [B, chunk, A]; tables [rows, 2, D] and [D] of this step."""
        chunk, dtype, width = self.config.chunk, memory.dtype, self.dit.sizes.width
        actions = linear.linear(x, self.encode_in_weight, self.encode_in_bias).to(dtype)
        mixed = linear.linear(actions, self.encode_mix_weight[:, :width], tables[1].to(dtype), activation="silu")
        tokens = linear.linear(mixed, self.encode_out_weight, self.encode_out_bias)
        if self.config.positions:
            tokens = tokens + self.position[:chunk]
        if prefix is not None:
            tokens = torch.cat([prefix, tokens], dim=1)
        rows = self.dit(tokens, tables[0], memory, valid)[:, -chunk:].contiguous()
        hidden = linear.linear(rows, self.decode_in_weight, self.decode_in_bias, activation="relu")
        return euler.project_and_step(hidden, self.decode_out_weight, self.decode_out_bias, x, 1.0 / self.config.steps)


class StarVla(nn.Module):
    """The backbone and its head; QwenFast has none of its own but the vocabulary's."""

    def __init__(self, config: StarVlaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Qwen3VL(config.vlm)
        width = config.vlm.language.width
        if config.dit is not None:
            self.head = FlowHead(config, config.dit)
            if config.framework == "QwenPI_v3" and config.dit.context_width != width:
                self.projections = Projections(len(config.dit.cross_blocks), config.dit.context_width, width)
        elif config.framework == "QwenOFT":
            self.regression = RegressionHead(width, config.max_action_dim)
        else:
            self.vocabulary = qwen3.Qwen3Head(config.vlm.language)


def _affine(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(rows))
