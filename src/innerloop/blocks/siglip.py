"""SigLIP vision tower and the projector into the language model's width."""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import nn

from innerloop.blocks.sizes import VisionSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import attention, fused, launch, linear, norm

EPS = 1e-6  # SiglipVisionConfig.layer_norm_eps
Shares = tuple[torch.Tensor, torch.Tensor | None]
"""What `linear.deferred` leaves to the following norm: shares of a product, and a bias."""


class SiglipLayer(nn.Module):
    """Pre-norm encoder layer; query, key and value are one product."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        d, f = sizes.hidden_size, sizes.intermediate_size
        self.heads = sizes.heads
        self.norm1_weight, self.norm1_bias = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.qkv_weight, self.qkv_bias = nn.Parameter(torch.empty(3 * d, d)), nn.Parameter(torch.empty(3 * d))
        self.out_weight, self.out_bias = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(d))
        self.norm2_weight, self.norm2_bias = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.up_weight, self.up_bias = nn.Parameter(torch.empty(f, d)), nn.Parameter(torch.empty(f))
        self.down_weight, self.down_bias = nn.Parameter(torch.empty(d, f)), nn.Parameter(torch.empty(d))

    def attend(self, normed: torch.Tensor, valid: torch.Tensor | None = None) -> Shares:
        """[I, T, D] normed, valid int32 [I, T] -> shares of the projected attention output [I, T, D]."""
        images, tokens, width = normed.shape
        head = width // self.heads
        qkv = linear.linear(normed, self.qkv_weight, self.qkv_bias).view(images, tokens, 3, self.heads, head)
        q, k, v = qkv.unbind(2)
        mixed = attention.attention(q, k, v, valid, head**-0.5)
        return linear.deferred(mixed, self.out_weight, self.out_bias)

    def mlp(self, normed: torch.Tensor) -> Shares:
        """[I, T, D] normed -> shares of [I, T, D], gelu_tanh between the two products."""
        hidden = linear.linear(normed, self.up_weight, self.up_bias, activation="gelu_tanh")
        return linear.deferred(hidden, self.down_weight, self.down_bias)


class Siglip(nn.Module):
    """Patches [B, C, T, 3*p*p] in [-1, 1] -> image tokens [B, C*T, out]."""

    def __init__(self, sizes: VisionSizes, out: int) -> None:
        super().__init__()
        d = sizes.hidden_size
        self.patch_weight = nn.Parameter(torch.empty(d, 3 * sizes.patch_size**2))
        self.patch_bias = nn.Parameter(torch.empty(d))
        self.position = nn.Parameter(torch.empty(sizes.tokens, d))
        self.layers = Stack([SiglipLayer(sizes) for _ in range(sizes.layers)])
        self.norm_weight, self.norm_bias = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.projector_weight, self.projector_bias = nn.Parameter(torch.empty(out, d)), nn.Parameter(torch.empty(out))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Each image attends to itself alone; images are the batch of every layer."""
        batch, cameras, tokens, _ = patches.shape
        x = linear.linear(patches.flatten(0, 1), self.patch_weight, self.patch_bias)
        first = self.layers[0]
        x, normed = norm.add_layer_norm(x, self.position, first.norm1_weight, first.norm1_bias, EPS)
        after = (self.norm_weight, self.norm_bias)
        _, normed, _ = encoded(self.layers, x, normed, EPS, SiglipLayer.attend, after)
        projected = linear.linear(normed, self.projector_weight, self.projector_bias)
        return projected.view(batch, cameras * tokens, -1)


Layer = TypeVar("Layer", bound=SiglipLayer)


def encoded(
    layers: Stack[Layer],
    x: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
    attend: Callable[[Layer, torch.Tensor], Shares],
    after: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    kept: Collection[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """x [I, T, D] and what layer 0 reads of it -> the sum after the last layer, its layer norm by `after`, and the sums
    after the layers `kept`, in their order. attend: a layer and its normed input -> shares of its attention.
    """
    following = [(layer.norm1_weight, layer.norm1_bias) for layer in list(layers)[1:]]
    sums = []
    with launch.dependent_launch(fused(x)):
        for i, (layer, (weight, bias)) in enumerate(zip(layers, [*following, after], strict=True)):
            delta, left = attend(layer, normed)
            x, normed = norm.add_layer_norm(x, delta, layer.norm2_weight, layer.norm2_bias, eps, left)
            delta, left = layer.mlp(normed)
            x, normed = norm.add_layer_norm(x, delta, weight, bias, eps, left)
            if i in kept:
                sums.append(x)
    return x, normed, sums
