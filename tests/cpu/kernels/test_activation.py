"""Activations and gated linear units."""

import pytest
import torch
from agreement import agree

from innerloop.kernels import activation

KINDS = ("gelu_tanh", "gelu", "silu", "relu", "relu2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_against_reference(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 74).mul(6).to(dtype)
    agree("activation", "activate", x, kind)
    agree("activation", "glu", x, kind)
    agree("activation", "activate", x.chunk(2, dim=-1)[1], kind)


def test_large_inputs_saturate() -> None:
    x = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]])
    for kind in KINDS[:3]:
        agree("activation", "activate", x, kind)


def test_names() -> None:
    x = torch.linspace(-3, 3, 11)
    assert torch.equal(activation.gelu(x, approximate=True), torch.nn.functional.gelu(x, approximate="tanh"))
    assert torch.equal(activation.gelu(x, approximate=False), torch.nn.functional.gelu(x))
    assert torch.equal(activation.silu(x), torch.nn.functional.silu(x))
    assert torch.equal(activation.relu2(x), x.clamp_min(0) ** 2)
