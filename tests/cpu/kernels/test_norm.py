"""Norms under the interpreter: odd rows, widths that fill no block, table rows as modulation."""

import pytest
import torch
from agreement import agree

from innerloop.kernels import norm
from innerloop.kernels.norm import triton as triton_norm

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1, 24), (2, 3, 37), (3, 5, 130))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = (torch.randn(shape).mul(3).add(1).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    agree("norm", "rms_norm", x, weight, 1e-6, True)
    agree("norm", "rms_norm", x[0, 0], None, 1e-6, False)
    agree("norm", "layer_norm", x, weight, bias, 1e-6)
    agree("norm", "layer_norm", x, None, None, 1e-5)
    each = torch.randn(2, shape[0], 1, shape[-1]).to(dtype)  # an entry of the first axis has its own
    agree("norm", "layer_norm", x, each[0], each[1], 1e-6)
    agree("norm", "add_rms_norm", x, delta, weight, 1e-6, False)
    agree("norm", "add_layer_norm", x, delta, weight, bias, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [1, 2, 36])
def test_each_input_by_its_own(layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(shape).mul(3).add(1).to(dtype) for _ in range(layers)]
    inputs[-1] = inputs[-1].flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    weight, bias = torch.randn(2, layers, shape[-1]).to(dtype)
    agree("norm", "layer_norms", inputs, weight, bias, 1e-5)
    one = triton_norm.layer_norm(inputs[-1], weight[-1], bias[-1], 1e-5)
    assert torch.equal(triton_norm.layer_norms(inputs, weight, bias, 1e-5)[-1], one)
    plain = layers // 2
    agree("norm", "layer_norms", inputs, weight[plain:], bias[plain:], 1e-5, plain)
    assert all(
        torch.equal(found, given)
        for found, given in zip(
            triton_norm.layer_norms(inputs, weight[plain:], bias[plain:], 1e-5, plain), inputs[:plain], strict=False
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_modulated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, _, width = shape
    x, delta = (torch.randn(shape).to(dtype) for _ in range(2))
    scale, shift, gate = torch.randn(batch, 1, 3 * width).chunk(3, dim=-1)
    one = torch.randn(width)
    for s, b, g in ((scale, shift, gate), (one, one, one), (scale, None, None)):
        agree("norm", "modulated_rms_norm", x, s, b, 1e-6)
        agree("norm", "modulated_layer_norm", x, s, b, 1e-6)
        agree("norm", "gated_add_rms_norm", x, delta, g, s, b, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_below_a_prefix_take_the_second_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, tokens, width = shape
    x, delta = (torch.randn(shape).to(dtype) for _ in range(2))
    table = torch.randn(4, 3, width)[::3]  # a row of the solver's table and a distant one, as strided as they are there
    scale, shift, gate = table.unbind(1)
    for first in range(tokens + 2):
        prefix = (torch.arange(batch, dtype=torch.int32)[:, None] + first) % (tokens + 2)
        agree("norm", "modulated_rms_norm", x, scale, shift, 1e-6, prefix)
        agree("norm", "modulated_rms_norm", x, scale, None, 1e-6, prefix)
        agree("norm", "gated_add", x, delta, gate, prefix)
    agree("norm", "gated_add", x, delta, gate[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [1, 4])
def test_shares_behind_a_gate_and_a_prefix(shares: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        batch, tokens, width = shape
        x, delta = torch.randn(shape).to(dtype), torch.randn(shares, *shape).to(dtype)
        scale, shift, gate = torch.randn(4, 3, width)[::3].unbind(1)
        for first in range(tokens + 2):
            prefix = (torch.arange(batch, dtype=torch.int32)[:, None] + first) % (tokens + 2)
            agree("norm", "gated_add_rms_norm", x, delta, gate, scale, shift, 1e-6, prefix)
            agree("norm", "gated_add", x, delta, gate, prefix)
        agree("norm", "gated_add_rms_norm", x, delta, None, scale[0], None, 1e-6)
        agree("norm", "gated_add", x, delta, gate[0])
        agree("norm", "gated_add", x, delta, None)


def test_each_entry_has_its_own_prefix() -> None:
    """Row by row against the plain norm, and prefix 0 has its bits."""
    x, (scale, shift) = torch.randn(3, 5, 37), torch.randn(2, 2, 37)
    prefix = torch.tensor([0, 2, 5], dtype=torch.int32)
    for module in (norm, triton_norm):
        found = module.modulated_rms_norm(x, scale, shift, 1e-6, prefix)
        usual, given = (module.modulated_rms_norm(x, scale[i], shift[i], 1e-6) for i in range(2))
        for entry, length in enumerate(prefix.tolist()):
            assert torch.equal(found[entry, :length], given[entry, :length])
            assert torch.equal(found[entry, length:], usual[entry, length:])


def test_a_constant_row_is_finite() -> None:
    agree("norm", "layer_norm", torch.full((1, 2, 40), 7.0), None, None, 1e-6)
    agree("norm", "rms_norm", torch.zeros(1, 2, 40), None, 1e-6)


def test_rows_that_are_not_contiguous() -> None:
    wide = torch.randn(2, 6, 80)
    agree("norm", "rms_norm", wide[:, ::2, :40], torch.randn(40), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [1, 3])
def test_shares_and_a_bias_are_added_once(shares: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, (weight, bias, left) = torch.randn(shape).to(dtype), (torch.randn(shape[-1]).to(dtype) for _ in range(3))
        delta = torch.randn(shares, *shape).to(dtype)
        for b in (None, left):
            agree("norm", "add_rms_norm", x, delta, weight, 1e-6, True, b)
            agree("norm", "add_layer_norm", x, delta, weight, bias, 1e-6, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens", "lead"), [(1, 5, 1), (2, 4, 3), (3, 2, 1)])
def test_a_delta_of_the_last_tokens_alone(batch: int, tokens: int, lead: int, dtype: torch.dtype) -> None:
    x, (weight, bias, left) = torch.randn(batch, tokens, 70).to(dtype), torch.randn(3, 70)
    for shares in (1, 3):
        delta = torch.randn(shares, batch, tokens - lead, 70).to(dtype)
        for b in (None, left):
            agree("norm", "add_layer_norm", x, delta, weight, bias, 1e-6, b, lead)
        total, _ = triton_norm.add_layer_norm(x, delta, weight, bias, 1e-6, left, lead)
        assert torch.equal(total[:, :lead], x[:, :lead])
    one = torch.randn(batch, tokens - lead, 70).to(dtype)
    agree("norm", "add_layer_norm", x, one, None, None, 1e-6, None, lead)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_that_every_batch_entry_shares(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, delta, weight = torch.randn(shape).to(dtype), torch.randn(shape[1:]).to(dtype), torch.randn(shape[-1])
        agree("norm", "add_layer_norm", x, delta, weight, None, 1e-6)
        agree("norm", "add_rms_norm", x, delta, weight, 1e-6)
