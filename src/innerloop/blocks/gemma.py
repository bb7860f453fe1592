"""Gemma decoder as a prefix encoder: every layer's keys and values, nothing that nobody reads."""

import torch
from torch import nn

from innerloop.blocks.sizes import DecoderSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import attention, fused, launch, linear, norm, rope

EPS = 1e-6  # GemmaConfig.rms_norm_eps


class GemmaLayer(nn.Module):
    """Fused weights of one decoder layer; norms are stored as w and applied as 1 + w."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        d, f, q = sizes.width, sizes.mlp_dim, sizes.heads * sizes.head_dim
        self.input_norm = nn.Parameter(torch.empty(d))
        self.qkv_weight = nn.Parameter(torch.empty(sizes.qkv_rows, d))
        self.out_weight = nn.Parameter(torch.empty(d, q))
        self.mlp_norm = nn.Parameter(torch.empty(d))
        self.gate_up_weight = nn.Parameter(torch.empty(2 * f, d))
        self.down_weight = nn.Parameter(torch.empty(d, f))


class GemmaLastLayer(nn.Module):
    """The last prefix layer: only its keys and values are ever read (openpi computes the rest for nothing)."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.input_norm = nn.Parameter(torch.empty(sizes.width))
        self.kv_weight = nn.Parameter(torch.empty(2 * sizes.kv_heads * sizes.head_dim, sizes.width))


class GemmaPrefix(nn.Module):
    """Embeds tokens and turns a prefix into the K/V of every layer (bidirectional over valid tokens)."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.empty(sizes.vocab_size, sizes.width))
        self.layers = Stack([GemmaLayer(sizes) for _ in range(sizes.depth - 1)])
        self.last = GemmaLastLayer(sizes)

    @property
    def embedding_scale(self) -> float:
        """sqrt(width) rounded to the embedding's dtype, as Gemma multiplies it."""
        return float(torch.tensor(self.sizes.width**0.5).to(self.embedding.dtype))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_valid: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """x [B, T, D] -> rows [0, T) of keys and values [L, B, S, Hkv, hd]; key_valid int32 [B, T]."""
        s, tokens = self.sizes, x.shape[1]
        normed = norm.rms_norm(x, self._norm_of(0), EPS, plus_one=True)
        with launch.dependent_launch(fused(x)):
            for i, layer in enumerate(self.layers):
                k, v = keys[i], values[i]
                qkv = linear.linear(normed, layer.qkv_weight)
                q = rope.rotate_and_store(qkv, cos, sin, s.heads, s.kv_heads, k, v, 0)
                mixed = attention.attention(q, k[:, :tokens], v[:, :tokens], key_valid, s.head_dim**-0.5)
                delta, _ = linear.deferred(mixed, layer.out_weight)
                x, normed = norm.add_rms_norm(x, delta, layer.mlp_norm, EPS, plus_one=True)
                hidden = linear.gated(normed, layer.gate_up_weight, "gelu_tanh")
                delta, _ = linear.deferred(hidden, layer.down_weight)
                x, normed = norm.add_rms_norm(x, delta, self._norm_of(i + 1), EPS, plus_one=True)
        kv = linear.linear(normed, self.last.kv_weight)
        rope.rotate_and_store(kv, cos, sin, 0, s.kv_heads, keys[-1], values[-1], 0)

    def _norm_of(self, layer: int) -> torch.Tensor:
        owner = self.layers[layer] if layer < len(self.layers) else self.last
        weight: torch.Tensor = owner.input_norm
        return weight
