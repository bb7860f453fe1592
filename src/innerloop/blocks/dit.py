"""The diffusion transformer of GR00T-style action heads: layer norms modulated by time, cross-attention to a context.

Who calls what, by clock:
- a `prepare` stage, once a checkpoint: `DiT.tables(times)` into a static float32 buffer [steps, rows, 2, width];
- the context stage, once an observation: `DiT.remember(contexts, memory)` into a state buffer `memory_shape(...)`, which
  holds K and V of every cross block (the official heads project them again at each step);
- the action stage, every step: `DiT(x, table[step], memory, valid)`, where x may be what stands before and below the
  tokens, and the product that makes these comes apart (`entering`): the first norm adds it.

Block i reads the context when `crosses(i)`, else its own tokens. `contexts` is one tensor for all cross blocks (GR00T,
StarVLA QwenGR00T) or stacked, one a cross block (StarVLA QwenPI); `valid` likewise is one mask or one a cross block (GR00T N1.7
alternates between text and image keys). A plain transformer without time (GR00T's vl_self_attention) is not this class:
its layers are those of blocks.siglip.SiglipLayer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from innerloop.blocks import affine
from innerloop.blocks.packing import Packable
from innerloop.blocks.siglip import Shares
from innerloop.blocks.stack import Stack
from innerloop.kernels import activation, attention, launch, linear, norm, skinny

EPS = 1e-5  # norm_eps of the blocks (Isaac-GR00T cross_attention_dit.py)
OUTPUT_EPS = 1e-6  # norm_out of the same file
TIME_CHANNELS = 256  # its TimestepEncoder
# Read in float32 at any precision: they are applied once a checkpoint.
FLOAT32 = ("modulation_*", "time_*")
BLOCK = {"out_": "attn1.to_out.0.", "up_": "ff.net.0.proj.", "down_": "ff.net.2."}


@dataclass(frozen=True)
class DiTSizes:
    """width = heads * head_dim; context_width: of what cross blocks read; output: width of the output head, 0 without."""

    heads: int
    head_dim: int
    depth: int
    context_width: int
    interleave: bool
    output: int = 0

    @property
    def width(self) -> int:
        """Inner width."""
        return self.heads * self.head_dim

    def crosses(self, block: int) -> bool:
        """Whether a block reads the context: every one, or the even ones where self-attention is interleaved."""
        return not (self.interleave and block % 2)

    @property
    def cross_blocks(self) -> tuple[int, ...]:
        """The blocks that read the context, in order."""
        return tuple(i for i in range(self.depth) if self.crosses(i))

    @property
    def table_rows(self) -> int:
        """Modulated norms: one a block, and the output head's."""
        return self.depth + (self.output > 0)

    def memory_shape(self, batch: int, keys: int) -> tuple[int, ...]:
        """[B, keys, cross blocks, 2 (K and V), heads, head_dim]: as one product over a shared context has it."""
        return (batch, keys, len(self.cross_blocks), 2, self.heads, self.head_dim)


class DiTBlock(nn.Module):
    """Attention and feed-forward of one block; `crosses` blocks have their K and V rows in the DiT's fused product."""

    def __init__(self, sizes: DiTSizes, crosses: bool) -> None:
        super().__init__()
        d, rows = sizes.width, sizes.width * (1 if crosses else 3)
        self.crosses = crosses
        self.heads, self.head_dim = sizes.heads, sizes.head_dim
        self.q_weight, self.q_bias = nn.Parameter(torch.empty(rows, d)), nn.Parameter(torch.empty(rows))
        self.out_weight, self.out_bias = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(d))
        self.up_weight, self.up_bias = nn.Parameter(torch.empty(4 * d, d)), nn.Parameter(torch.empty(4 * d))
        self.down_weight, self.down_bias = nn.Parameter(torch.empty(d, 4 * d)), nn.Parameter(torch.empty(d))

    def attend(self, normed: torch.Tensor, memory: torch.Tensor | None, valid: torch.Tensor | None) -> Shares:
        """normed [B, T, D]; memory [B, S, 2, H, hd] and valid int32 [B, S] of a cross block -> shares of [B, T, D]."""
        mixed = self.mix(linear.linear(normed, self.q_weight, self.q_bias), memory, valid)
        return linear.deferred(mixed, self.out_weight, self.out_bias)

    def mix(self, product: torch.Tensor, memory: torch.Tensor | None, valid: torch.Tensor | None) -> torch.Tensor:
        """product [B, T, D] of a cross block's query, [B, T, 3 D] of a self block -> attention's [B, T, D]."""
        batch, tokens, _ = product.shape
        if memory is None:
            q, k, v = product.view(batch, tokens, 3, self.heads, self.head_dim).unbind(2)
            return attention.attention(q, k, v, valid, self.head_dim**-0.5)
        q, (k, v) = product.view(batch, tokens, self.heads, self.head_dim), memory.unbind(2)
        return attention.remembered(q, k, v, valid, self.head_dim**-0.5)

    def mlp(self, normed: torch.Tensor) -> Shares:
        """normed [B, T, D] -> shares of [B, T, D]."""
        hidden = linear.linear(normed, self.up_weight, self.up_bias, activation="gelu_tanh")
        return linear.deferred(hidden, self.down_weight, self.down_bias)


class DiT(Packable):
    """Blocks, time embedding and, where sizes.output says so, the output head.

    tokens: rows of one robot that the blocks see, 0 where that is not known; few of them are worth packing for.
    """

    def __init__(self, sizes: DiTSizes, tokens: int = 0) -> None:
        super().__init__()
        self.tokens = tokens
        d, kv = sizes.width, 2 * sizes.width * len(sizes.cross_blocks)
        self.sizes = sizes
        self.time_in_weight = nn.Parameter(torch.empty(d, TIME_CHANNELS))
        self.time_in_bias = nn.Parameter(torch.empty(d))
        self.time_out_weight, self.time_out_bias = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(d))
        self.modulation_weight = nn.Parameter(torch.empty(sizes.table_rows * 2 * d, d))
        self.modulation_bias = nn.Parameter(torch.empty(sizes.table_rows * 2 * d))
        self.kv_weight = nn.Parameter(torch.empty(kv, sizes.context_width))
        self.kv_bias = nn.Parameter(torch.empty(kv))
        self.blocks = Stack([DiTBlock(sizes, sizes.crosses(i)) for i in range(sizes.depth)])
        if sizes.output:
            self.head_weight = nn.Parameter(torch.empty(sizes.output, d))
            self.head_bias = nn.Parameter(torch.empty(sizes.output))

    def tables(self, times: torch.Tensor) -> torch.Tensor:
        """times float32 [N], in the buckets the checkpoint was trained with -> float32 [N, rows, 2, D].

        Row r holds what norm r multiplies (1 + scale) and adds (shift).
        """
        hidden = activation.silu(linear.linear(waves(times), self.time_in_weight, self.time_in_bias))
        condition = activation.silu(linear.linear(hidden, self.time_out_weight, self.time_out_bias))
        rows = linear.linear(condition, self.modulation_weight, self.modulation_bias)
        table = rows.view(len(times), self.sizes.table_rows, 2, self.sizes.width)
        scale, shift = table[:, :, 0], table[:, :, 1]
        if self.sizes.output:  # the head stores shift before scale, the blocks scale before shift
            scale, shift = (torch.cat([a[:, :-1], b[:, -1:]], dim=1) for a, b in ((scale, shift), (shift, scale)))
        return torch.stack([1.0 + scale, shift], dim=2)

    def remember(self, contexts: torch.Tensor, memory: torch.Tensor) -> None:
        """contexts [B, S, C] for all cross blocks, or [cross blocks, B, S, C] -> memory, its rows [0, S)."""
        batch, tokens, _ = contexts.shape[-3:]
        held = memory[:, :tokens].flatten(3)  # [B, S, cross blocks, 2 D]
        if contexts.dim() == 3:
            linear.into(contexts, self.kv_weight, self.kv_bias, held.view(batch, tokens, -1))
            return
        crosses = len(contexts)
        rows, by_block = contexts.view(crosses, batch * tokens, -1), held.permute(2, 0, 1, 3)
        if batch == 1:
            linear.batched(rows, self.kv_weight, self.kv_bias, by_block[:, 0])
            return
        product = linear.batched(rows, self.kv_weight, self.kv_bias)
        by_block.copy_(product.view(crosses, batch, tokens, -1))

    def forward(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        memory: torch.Tensor,
        valid: torch.Tensor | Sequence[torch.Tensor],
        entering: Shares | None = None,
    ) -> torch.Tensor:
        """x [B, T, D], table [rows, 2, D] of this step, memory as `remember` left it, valid int32 [B, S], one or each
        cross block's -> [B, T, D]: what the output head multiplies, or the residual stream where there is none.

        entering: a product of the last tokens that x lacks yet (`linear.deferred`).
        """
        crosses = len(self.sizes.cross_blocks)
        masks = [valid] * crosses if isinstance(valid, torch.Tensor) else valid
        run = self._few_rows if isinstance(self.blocks[0].q_weight, skinny.Packed) else self._dense
        with launch.dependent_launch(linear.chains(x)):
            return run(x, table, memory, masks, entering)

    def _entered(
        self, x: torch.Tensor, table: torch.Tensor, entering: Shares | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x with what enters it, and its norm for the first block."""
        if entering is None:
            return x, norm.layer_norm(x, table[0, 0], table[0, 1], EPS)
        delta, left = entering
        lead = x.shape[1] - delta.shape[-2]
        return norm.add_layer_norm(x, delta, table[0, 0], table[0, 1], EPS, left, lead)

    def _dense(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        memory: torch.Tensor,
        masks: Sequence[torch.Tensor],
        entering: Shares | None,
    ) -> torch.Tensor:
        """`forward` with norms between the products."""
        x, normed = self._entered(x, table, entering)
        cross, last = 0, self.sizes.depth - 1
        for i, block in enumerate(self.blocks):
            own, mask = (memory[:, :, cross], masks[cross]) if block.crosses else (None, None)
            cross += block.crosses
            delta, left = block.attend(normed, own, mask)
            x, normed = norm.add_layer_norm(x, delta, None, None, EPS, left)
            delta, left = block.mlp(normed)
            if i < last:
                x, normed = norm.add_layer_norm(x, delta, table[i + 1, 0], table[i + 1, 1], EPS, left)
        if not self.sizes.output:
            return norm.add_layer_norm(x, delta, None, None, EPS, left)[0]
        return norm.add_layer_norm(x, delta, table[-1, 0], table[-1, 1], OUTPUT_EPS, left)[1]

    def _few_rows(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        memory: torch.Tensor,
        masks: Sequence[torch.Tensor],
        entering: Shares | None,
    ) -> torch.Tensor:
        """`forward` over packed products: norms, biases and residuals inside them."""
        if entering is not None:
            x, _ = self._entered(x, table, entering)
        cross = 0
        for i, block in enumerate(self.blocks):
            own, mask = (memory[:, :, cross], masks[cross]) if block.crosses else (None, None)
            cross += block.crosses
            query = (x, table[i, 0], table[i, 1], EPS, block.q_weight, block.q_bias)
            if own is None:
                mixed = block.mix(skinny.norm_linear(*query), None, None)
            else:
                k, v = own.unbind(2)
                mixed = skinny.norm_attend(*query, k, v, mask, block.heads)
            x = skinny.project_residual(mixed, block.out_weight, None, x, block.out_bias)
            hidden = skinny.norm_linear(x, None, None, EPS, block.up_weight, block.up_bias, gelu=True)
            x = skinny.project_residual(hidden, block.down_weight, None, x, block.down_bias)
        if not self.sizes.output:
            return x
        return norm.layer_norm(x, table[-1, 0], table[-1, 1], OUTPUT_EPS)

    def behind_head(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weight [N, output] and bias [N] of the product behind the output head -> [N, D] and [N] of both; float64.

        No activation stands between the two.
        """
        weight, bias = weight.double(), bias.double()
        if not self.sizes.output:
            return weight, bias
        return weight @ self.head_weight.double(), weight @ self.head_bias.double() + bias

    def packable(self) -> dict[str, int]:
        """The blocks' products. A norm's product takes at most 16 warps."""
        if self.sizes.width % skinny.WARP_COLUMNS or self.sizes.width > 16 * skinny.WARP_COLUMNS:
            return {}
        names = ("q_weight", "out_weight", "up_weight", "down_weight")
        return {f"blocks.{i}.{name}": 8 for i in range(self.sizes.depth) for name in names}


def waves(times: torch.Tensor) -> torch.Tensor:
    """float32 [N] -> [N, 256], cosines then sines of diffusers' Timesteps(downscale_freq_shift=1).

    In float32 throughout, as trained: at t = 750 its rounding moves the phase by more than the tolerance of parity.
    """
    half = TIME_CHANNELS // 2
    exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=times.device) / (half - 1)
    angles = times[:, None] * exponent.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def names(sizes: DiTSizes, theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """Our parameter names -> those of diffusers-style checkpoints (GR00T, StarVLA): `theirs` ends before `transformer_blocks`."""
    blocks = [f"transformer_blocks.{i}." for i in range(sizes.depth)]
    norms = (*(f"{block}norm1.linear." for block in blocks), *(("proj_out_1.",) if sizes.output else ()))
    whole: dict[str, Sequence[str]] = {
        "time_in_": "timestep_encoder.timestep_embedder.linear_1.",
        "time_out_": "timestep_encoder.timestep_embedder.linear_2.",
        "modulation_": norms,
        "kv_": tuple(f"{blocks[i]}attn1.to_{part}." for i in sizes.cross_blocks for part in "kv"),
    }
    found = affine.names(whole | ({"head_": "proj_out_2."} if sizes.output else {}), theirs, ours)
    for i, block in enumerate(blocks):
        own = {"q_": tuple(f"attn1.to_{part}." for part in ("q" if sizes.crosses(i) else "qkv")), **BLOCK}
        found |= affine.names(own, f"{theirs}{block}", f"{ours}blocks.{i}.")
    return found
