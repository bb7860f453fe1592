"""RMS and layer norm: plain, residual-adding, modulated from a table (adaRMS, AdaLN), gated.

x and delta are [..., D]; weight, bias, scale, shift and gate [D], or [B, 1, D] where x's first axis is B. Results have x's dtype.
Where delta_bias [D] may be given, delta may be shares [P, ..., D] (`linear.deferred`), or lack leading dimensions of x
and be the same along them; all are added in fp32.
Where prefix int32 [B] or [B, 1] may be given, scale, shift and gate are then [2, D]: the first prefix[b] of the tokens
[B, T, D] take row 1, the others row 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from innerloop.kernels.norm import reference
from innerloop.kernels.select import chosen, unfused


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; Gemma stores weight - 1 (`plus_one`)."""
    return chosen(reference.rms_norm, x)(x, weight, eps, plus_one)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    return chosen(reference.layer_norm, x)(x, weight, bias, eps)


def layer_norms(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor, eps: float, plain: int = 0) -> Tensor:
    """L inputs [..., D] of one shape, weight and bias [L - plain, D] -> [L, ..., D], each by its own: one kernel for all.

    The first `plain` of them come as they are.
    """
    if unfused(inputs[0]):
        normed = [layer_norm(x, w, b, eps) for x, w, b in zip(inputs[plain:], weight, bias, strict=True)]
        return torch.stack([*inputs[:plain], *normed])
    return chosen(reference.layer_norms, inputs[0])(inputs, weight, bias, eps, plain)


def add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    eps: float,
    plus_one: bool = False,
    delta_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta))."""
    if unfused(x):
        total = _sum(x, delta, delta_bias)
        return total, rms_norm(total, weight, eps, plus_one)
    return chosen(reference.add_rms_norm, x)(x, delta, weight, eps, plus_one, delta_bias)


def add_layer_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    delta_bias: Tensor | None = None,
    lead: int = 0,
) -> tuple[Tensor, Tensor]:
    """(x + delta, layer_norm(x + delta)); the first `lead` of an entry's T tokens take nothing of a delta [..., B, T - lead, D]."""
    if unfused(x):
        total = _sum(x[:, lead:] if lead else x, delta, delta_bias)
        total = torch.cat([x[:, :lead], total], dim=1) if lead else total
        return total, layer_norm(total, weight, bias, eps)
    return chosen(reference.add_layer_norm, x)(x, delta, weight, bias, eps, delta_bias, lead)


def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, prefix: Tensor | None = None
) -> Tensor:
    """adaRMS: rms_norm(x) * (1 + scale) + shift."""
    return chosen(reference.modulated_rms_norm, x)(x, scale, shift, eps, prefix)


def gated_add(x: Tensor, delta: Tensor, gate: Tensor | None, prefix: Tensor | None = None) -> Tensor:
    """x + gate * delta, without a norm; delta may be shares [P, ..., D], which are added in fp32."""
    return chosen(reference.gated_add, x)(x, delta, gate, prefix)


def gated_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + gate * delta, modulated_rms_norm(x + gate * delta)); delta may be shares [P, ..., D], as in `gated_add`."""
    if unfused(x):
        total = gated_add(x, delta, gate, prefix)
        return total, modulated_rms_norm(total, scale, shift, eps, prefix)
    return chosen(reference.gated_add_rms_norm, x)(x, delta, gate, scale, shift, eps, prefix)


def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """AdaLN: layer_norm(x) * (1 + scale) + shift."""
    return chosen(reference.modulated_layer_norm, x)(x, scale, shift, eps)


def _sum(x: Tensor, delta: Tensor, delta_bias: Tensor | None) -> Tensor:
    for share in delta if delta.dim() > x.dim() else (delta,):
        x = x + share
    return x if delta_bias is None else x + delta_bias
