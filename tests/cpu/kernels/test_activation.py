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
    assert torch.equal(activation.activate(x, "gelu_tanh"), torch.nn.functional.gelu(x, approximate="tanh"))
    assert torch.equal(activation.activate(x, "gelu"), torch.nn.functional.gelu(x))
    assert torch.equal(activation.silu(x), torch.nn.functional.silu(x))
    assert torch.equal(activation.activate(x, "relu2"), x.clamp_min(0) ** 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_and_its_second_row_below_a_prefix(dtype: torch.dtype) -> None:
    x, table = torch.randn(3, 5, 74).to(dtype), torch.randn(4, 74)[::3]
    agree("activation", "activate", x, "silu", table[0])
    for lengths in ([0, 0, 0], [5, 1, 0], [2, 7, 3]):
        prefix = torch.tensor(lengths, dtype=torch.int32)[:, None]
        agree("activation", "activate", x, "silu", table, prefix)
        found = activation.activate(x, "relu", table, prefix)
        for entry, length in enumerate(lengths):
            assert torch.equal(found[entry, :length], activation.activate(x[entry, :length], "relu", table[1]))
            assert torch.equal(found[entry, length:], activation.activate(x[entry, length:], "relu", table[0]))
