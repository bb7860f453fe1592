"""The action expert: a narrow Gemma that reads the prefix's K/V, few rows at a time, many times a decision."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from innerloop.blocks.packing import Packable
from innerloop.blocks.sizes import DecoderSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import attention, launch, linear, norm, skinny

EPS = 1e-6  # GemmaConfig.rms_norm_eps


@dataclass(frozen=True)
class Modulation:
    """What a norm multiplies and adds, and what gates the branch after it: float32 [D] each, or [2, D] under a prefix.

    Row 1 is then that of tokens below the prefix. A plain Gemma norm is scale = weight without shift and gate.
    """

    scale: torch.Tensor
    shift: torch.Tensor | None = None
    gate: torch.Tensor | None = None


@dataclass(frozen=True)
class Cache:
    """K/V of one decision: keys and values [L, B, S, Hkv, hd], valid int32 [B, S]."""

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor


class ExpertLayer(nn.Module):
    """The four products of a layer; norms come from outside as Modulation."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        d, f, q = sizes.width, sizes.mlp_dim, sizes.heads * sizes.head_dim
        self.qkv_weight = nn.Parameter(torch.empty(sizes.qkv_rows, d))
        self.out_weight = nn.Parameter(torch.empty(d, q))
        self.gate_up_weight = nn.Parameter(torch.empty(2 * f, d))
        self.down_weight = nn.Parameter(torch.empty(d, f))


class ActionExpert(Packable):
    """Layers of the expert; `norms` holds 2 per layer, input then mlp."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = Stack([ExpertLayer(sizes) for _ in range(sizes.depth)])

    def forward(
        self,
        x: torch.Tensor,
        norms: Sequence[Modulation],
        cache: Cache,
        rotary: tuple[torch.Tensor, torch.Tensor],
        start: int,
        prefix: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, T, D] at cache rows [start, start + T) -> the residual stream after the last layer.

        prefix int32 [B, 1]: how many of an entry's first tokens are given (Modulation).
        Inside skinny.chain() kernels overlap; the caller has then finished writing cache, norms and rotary before.
        """
        if not isinstance(self.layers[0].qkv_weight, skinny.Packed) and linear.chains(x):
            return self._own_tiles(x, norms, cache, rotary, start, prefix)
        s = self.sizes
        for i, layer in enumerate(self.layers):
            first, second = norms[2 * i], norms[2 * i + 1]
            keys, values = cache.keys[i], cache.values[i]
            q = skinny.norm_qkv_rope(
                x, first.scale, first.shift, EPS, layer.qkv_weight, *rotary, s.heads, s.kv_heads, keys, values, start,
                prefix,
            )  # fmt: skip
            mixed = skinny.attend(q, keys, values, cache.valid, s.head_dim**-0.5, start)
            x = skinny.project_residual(mixed, layer.out_weight, first.gate, x, None, prefix)
            hidden = skinny.norm_glu(x, second.scale, second.shift, EPS, layer.gate_up_weight, prefix)
            x = skinny.project_residual(hidden, layer.down_weight, second.gate, x, None, prefix)
        return x

    def _own_tiles(
        self,
        x: torch.Tensor,
        norms: Sequence[Modulation],
        cache: Cache,
        rotary: tuple[torch.Tensor, torch.Tensor],
        start: int,
        prefix: torch.Tensor | None,
    ) -> torch.Tensor:
        """`forward` over dense products in a chain of dependent launches: eight kernels a layer.

        A norm between two products adds the shares of the first, its gate and the residual.
        """
        s = self.sizes
        with launch.dependent_launch():
            normed = norm.modulated_rms_norm(x, norms[0].scale, norms[0].shift, EPS, prefix)
            for i, layer in enumerate(self.layers):
                first, second = norms[2 * i], norms[2 * i + 1]
                keys, values = cache.keys[i], cache.values[i]
                q = linear.rotated(normed, layer.qkv_weight, *rotary, s.heads, s.kv_heads, keys, values, start)
                mixed = attention.continued(q, keys, values, cache.valid, s.head_dim**-0.5, start)
                delta, _ = linear.deferred(mixed, layer.out_weight)
                x, normed = norm.gated_add_rms_norm(x, delta, first.gate, second.scale, second.shift, EPS, prefix)
                delta, _ = linear.deferred(linear.gated(normed, layer.gate_up_weight, "gelu_tanh"), layer.down_weight)
                if i + 1 == s.depth:
                    return norm.gated_add(x, delta, second.gate, prefix)
                after = norms[2 * i + 2]
                x, normed = norm.gated_add_rms_norm(x, delta, second.gate, after.scale, after.shift, EPS, prefix)
        return x

    def packable(self) -> dict[str, int]:
        """Every product of every layer."""
        pairs = {
            "qkv_weight": self.sizes.head_dim // 2,
            "out_weight": 8,
            "gate_up_weight": self.sizes.mlp_dim,
            "down_weight": 8,
        }
        if any(getattr(self.layers[0], name).shape[1] % skinny.WARP_COLUMNS for name in pairs):
            return {}
        return {f"layers.{i}.{name}": pair for i in range(self.sizes.depth) for name, pair in pairs.items()}
