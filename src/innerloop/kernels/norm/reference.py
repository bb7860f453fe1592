"""Norms over the last dimension: statistics and affine part in fp32, one rounding to the input's dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight, or 1 + weight when plus_one)."""
    y = _rms(x, eps)
    if weight is not None:
        w = weight.float()
        y = y * (1.0 + w if plus_one else w)
    return y.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    y = _standardise(x, eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def layer_norms(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor, eps: float, plain: int = 0) -> Tensor:
    """layer_norm of each by its own weight and bias, but of the first `plain`."""
    normed = [layer_norm(x, w, b, eps) for x, w, b in zip(inputs[plain:], weight, bias, strict=True)]
    return torch.stack([*inputs[:plain], *normed])


def add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    eps: float,
    plus_one: bool = False,
    delta_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, rms_norm(total)) of total = x + delta, rounded before it is normalised."""
    total = _add(x, delta, None, delta_bias)
    return total, rms_norm(total, weight, eps, plus_one)


def add_layer_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    delta_bias: Tensor | None = None,
    lead: int = 0,
) -> tuple[Tensor, Tensor]:
    """(total, layer_norm(total)) of total = x + delta, rounded before it is normalised."""
    if lead:
        total = torch.cat([x[:, :lead], _add(x[:, lead:], delta, None, delta_bias)], dim=1)
    else:
        total = _add(x, delta, None, delta_bias)
    return total, layer_norm(total, weight, bias, eps)


def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, prefix: Tensor | None = None
) -> Tensor:
    """RMS-normalised x * (1 + scale) + shift."""
    if prefix is not None:
        scale = by_token(scale, prefix, x.shape[1])
        shift = None if shift is None else by_token(shift, prefix, x.shape[1])
    return _modulate(_rms(x, eps), scale, shift).to(x.dtype)


def gated_add(x: Tensor, delta: Tensor, gate: Tensor | None, prefix: Tensor | None = None) -> Tensor:
    """x + gate * delta, rounded once."""
    return _add(x, delta, gate if gate is None or prefix is None else by_token(gate, prefix, x.shape[1]))


def by_token(table: Tensor, prefix: Tensor, tokens: int) -> Tensor:
    """table [2, D] -> [B, tokens, D]: row 1 for the first prefix[b] tokens of entry b, row 0 for the others."""
    below = torch.arange(tokens, device=table.device) < prefix.view(-1, 1)
    return torch.where(below[..., None], table[1], table[0])


def gated_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(total, modulated_rms_norm(total)) of total = x + gate * delta, rounded before it is normalised."""
    total = gated_add(x, delta, gate, prefix)
    return total, modulated_rms_norm(total, scale, shift, eps, prefix)


def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """Layer-normalised x * (1 + scale) + shift."""
    return _modulate(_standardise(x, eps), scale, shift).to(x.dtype)


def _rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _standardise(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def _modulate(y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    y = y * (1.0 + scale.float())
    return y if shift is None else y + shift.float()


def _add(x: Tensor, delta: Tensor, gate: Tensor | None, delta_bias: Tensor | None = None) -> Tensor:
    whole = delta.float().sum(0) if delta.dim() > x.dim() else delta.float()
    if delta_bias is not None:
        whole = whole + delta_bias.float()
    step = whole if gate is None else gate.float() * whole
    return (x.float() + step).to(x.dtype)
