"""x W^T + b, then an activation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.activation.reference import Activation, activate, glu
from innerloop.kernels.rope.reference import rotate_and_store

FEW_ROWS = 64  # of one tile


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """The product is rounded to x's dtype before the activation."""
    y = F.linear(x, weight, bias)
    return y if activation is None else activate(y, activation)


def into(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """The product, copied."""
    out.copy_(linear(x, weight, bias))


def gated(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """The product is rounded to x's dtype before the unit."""
    return glu(F.linear(x, weight), kind)


def rotated(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
) -> Tensor:
    """The product is rounded to x's dtype before the rotation."""
    return rotate_and_store(F.linear(x, weight), cos, sin, heads, kv_heads, k_cache, v_cache, start)


def deferred(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """One share, which holds everything."""
    return linear(x, weight, bias)[None], None


def few_rows(x: Tensor) -> bool:
    """Whether x [..., K] is at most one tile of 16-bit rows."""
    return x.element_size() == 2 and x.numel() <= FEW_ROWS * x.shape[-1]


def batched(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """One product a layer, rounded to x's dtype before the activation."""
    layers, _, inner = x.shape
    product = torch.baddbmm(bias.view(layers, 1, -1), x, weight.view(layers, -1, inner).transpose(1, 2))
    y = product if activation is None else activate(product, activation)
    return y if out is None else out.copy_(y)
