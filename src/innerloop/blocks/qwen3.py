"""The Qwen3 decoder: q/k norm, three-axis rotary positions, SwiGLU, grouped heads, causal; DeepStack features added in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from innerloop.blocks.sizes import DecoderSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import attention, fused, launch, linear, norm, rope


@dataclass(frozen=True)
class Qwen3Sizes(DecoderSizes):
    """text_config of a Qwen3-VL, or config.json of a Qwen3; depth: the layers that are run, the lowest ones."""

    rope_theta: float = 5e6
    sections: tuple[int, int, int] = (24, 20, 20)  # rotary pairs of time, height and width
    eps: float = 1e-6
    tied: bool = True


@dataclass(frozen=True)
class Reading:
    """What every layer reads beside the hidden states.

    cos, sin: float32 [B, T, hd / 2] of the tokens; key_valid: int32 [B, S] of the cache's first S rows, S >= start + T.
    cache: keys and values [L, B, rows, Hkv, hd], or None where no layer's K/V outlive it; S is T then. start: cache row
    of token 0; an int64 [1] on the device where T is 1, so that one capture serves every row.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    key_valid: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor] | None = None
    start: int | torch.Tensor = 0


class Qwen3Layer(nn.Module):
    """Fused weights of one decoder layer."""

    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        d, f, q = sizes.width, sizes.mlp_dim, sizes.heads * sizes.head_dim
        self.input_norm = nn.Parameter(torch.empty(d))
        self.qkv_weight = nn.Parameter(torch.empty(sizes.qkv_rows, d))
        self.q_norm = nn.Parameter(torch.empty(sizes.head_dim))
        self.k_norm = nn.Parameter(torch.empty(sizes.head_dim))
        self.out_weight = nn.Parameter(torch.empty(d, q))
        self.mlp_norm = nn.Parameter(torch.empty(d))
        self.gate_up_weight = nn.Parameter(torch.empty(2 * f, d))
        self.down_weight = nn.Parameter(torch.empty(d, f))

    def attend(self, normed: torch.Tensor, sizes: Qwen3Sizes, reading: Reading, index: int) -> torch.Tensor:
        """normed [B, T, D] -> shares of [B, T, D]; writes K/V rows [start, start + T) of cache `index`, where there is one."""
        if reading.cache is None:
            shape = (*normed.shape[:2], sizes.kv_heads, sizes.head_dim)
            keys, values = normed.new_empty(shape), normed.new_empty(shape)
        else:
            keys, values = (kept[index] for kept in reading.cache)
        if isinstance(reading.start, int):
            q = self._store(normed, sizes, reading, keys, values, reading.start)
        else:
            k, v = torch.empty_like(keys[:, :1]), torch.empty_like(values[:, :1])
            q = self._store(normed, sizes, reading, k, v, 0)
            keys.index_copy_(1, reading.start, k)
            values.index_copy_(1, reading.start, v)
        seen, scale, causal = reading.key_valid.shape[1], sizes.head_dim**-0.5, q.shape[1] > 1
        mixed = attention.attention(q, keys[:, :seen], values[:, :seen], reading.key_valid, scale, causal)
        return linear.deferred(mixed, self.out_weight)[0]

    def _store(
        self,
        normed: torch.Tensor,
        sizes: Qwen3Sizes,
        reading: Reading,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
    ) -> torch.Tensor:
        qkv, heads = linear.linear(normed, self.qkv_weight), (sizes.heads, sizes.kv_heads)
        angles, norms = (reading.cos, reading.sin), (self.q_norm, self.k_norm)
        return rope.rotate_and_store(qkv, *angles, *heads, keys, values, start, *norms, eps=sizes.eps)

    def mlp(self, normed: torch.Tensor) -> torch.Tensor:
        """normed [B, T, D] -> shares of [B, T, D]."""
        hidden = linear.gated(normed, self.gate_up_weight, "silu")
        return linear.deferred(hidden, self.down_weight)[0]


class Qwen3(nn.Module):
    """Embedding and layers. The final norm belongs to `Qwen3Head`: policies read what comes before it."""

    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.empty(sizes.vocab_size, sizes.width))
        self.layers = Stack([Qwen3Layer(sizes) for _ in range(sizes.depth)])

    def outputs(
        self, x: torch.Tensor, reading: Reading, deepstack: Sequence[torch.Tensor] = ()
    ) -> Iterator[torch.Tensor]:
        """x [B, T, D] -> each layer's output in turn: before the final norm, after its DeepStack addition.

        deepstack: [B, T, D] for the first layers, zero where a token is not of an image. This is the meaning that
        hidden states had in transformers 4.57 (entry i + 1 is output i); later versions leave both out.
        A single query reads every valid key; several read causally, and then key_valid ends with the last of them.
        """
        layers = list(self.layers)
        normed = norm.rms_norm(x, layers[0].input_norm, self.sizes.eps)
        for i, layer in enumerate(layers):
            # A single row's products stay the library's, which would start after their predecessor's end anyway.
            with launch.dependent_launch(x.shape[1] > 1 and fused(x)):
                delta = layer.attend(normed, self.sizes, reading, i)
                x, normed = norm.add_rms_norm(x, delta, layer.mlp_norm, self.sizes.eps)
                delta = layer.mlp(normed)
                if i < len(deepstack):
                    x, _ = norm.add_rms_norm(x, delta, None, self.sizes.eps)
                    delta = deepstack[i]
                weight = layers[i + 1].input_norm if i + 1 < len(layers) else None
                x, normed = norm.add_rms_norm(x, delta, weight, self.sizes.eps)
            yield x

    def forward(self, x: torch.Tensor, reading: Reading, deepstack: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The last layer's output, before the final norm."""
        for output in self.outputs(x, reading, deepstack):
            x = output
        return x


class Qwen3Head(nn.Module):
    """Final norm and vocabulary; the weight is the embedding's where the two are tied."""

    def __init__(self, sizes: Qwen3Sizes) -> None:
        super().__init__()
        self.eps, self.tied = sizes.eps, sizes.tied
        self.norm = nn.Parameter(torch.empty(sizes.width))
        if not sizes.tied:
            self.weight = nn.Parameter(torch.empty(sizes.vocab_size, sizes.width))

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] before the final norm -> logits [B, T, V]."""
        weight = embedding if self.tied else self.weight
        return linear.linear(norm.rms_norm(x, self.norm, self.eps), weight)


def rotary(positions: torch.Tensor, sizes: Qwen3Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int32 [B, 3, T] (time, height, width) -> cos and sin, float32 [B, T, hd / 2].

    Pair j follows height where j % 3 = 1, width where j % 3 = 2, as far as their sections reach, else time
    (transformers Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope).
    """
    half, device = sizes.head_dim // 2, positions.device
    pair = torch.arange(half, device=device)
    high, wide = 3 * sizes.sections[1], 3 * sizes.sections[2]
    axis = ((pair % 3 == 1) & (pair < high)).long() + 2 * ((pair % 3 == 2) & (pair < wide)).long()
    exponent = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float32) / sizes.head_dim
    chosen = positions.float().index_select(1, axis).transpose(1, 2)
    angles = chosen * (1.0 / sizes.rope_theta**exponent)
    return angles.cos(), angles.sin()
