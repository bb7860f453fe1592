"""Embedding, time embedding, linear and the last projection."""

import math

import pytest
import torch
from agreement import agree

from innerloop.kernels import euler, launch, linear
from innerloop.kernels.embedding import triton as embedding_kernel
from innerloop.kernels.euler import triton as euler_kernel
from innerloop.kernels.timestep import triton as timestep_kernel

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype) -> None:
    table = torch.randn(19, 70).to(dtype)
    tokens = torch.tensor([[0, 18, 3], [7, 7, 0]], dtype=torch.int32)
    agree("embedding", "embed", tokens, table, 5.5)
    agree("embedding", "embed", tokens, table, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleave(dtype: torch.dtype) -> None:
    """Text where a row is the last one, pictures elsewhere; zeros beside text in what DeepStack adds."""
    table, visual = torch.randn(19, 70).to(dtype), torch.randn(3, 6, 70).to(dtype)
    visual[:, -1] = 0
    tokens = torch.tensor([[0, 18, 3, 5], [7, 7, 0, 1]], dtype=torch.int32)
    rows = torch.tensor([[5, 0, 4, 5], [2, 5, 5, 1]], dtype=torch.int32)
    agree("embedding", "interleave", tokens, table, rows, visual)
    found = embedding_kernel.interleave(tokens, table, rows, visual)
    text = rows == 5
    assert torch.equal(found[0][text], table[tokens[text].long()])
    assert torch.equal(found[0][~text], visual[0][rows[~text].long()])
    assert not found[1:, text].any()


@pytest.mark.parametrize("cos_first", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 130])
def test_sincos(dim: int, cos_first: bool) -> None:
    t = torch.linspace(1.0, 0.1, 7)
    agree("timestep", "sincos", t, dim, 4e-3, 4.0, cos_first)
    got = timestep_kernel.sincos(t, dim, 4e-3, 4.0, cos_first)
    column = dim // 2 - 1
    period = 4e-3 if column == 0 else 4.0
    angle = 2 * math.pi * float(t[2]) / period
    assert got[2, column] == pytest.approx((math.cos if cos_first else math.sin)(angle), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "actions", "width"), [(1, 7, 33), (5, 32, 64), (3, 1, 100)])
def test_project_and_step(rows: int, actions: int, width: int, dtype: torch.dtype) -> None:
    hidden, weight, bias = torch.randn(2, rows, width), torch.randn(actions, width), torch.randn(actions)
    x = torch.randn(2, rows, actions)
    agree("euler", "project_and_step", *(t.to(dtype) for t in (hidden, weight, bias)), x, -0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize(("rows", "actions", "width"), [(1, 7, 33), (21, 33, 64), (3, 132, 100)])
def test_project_in(rows: int, actions: int, width: int, activation: str | None, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, rows, actions), torch.randn(width, actions), torch.randn(width)
    agree("euler", "project_in", x, weight, bias, dtype, activation)


def test_many_actions_take_narrower_tiles() -> None:
    device = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
    widths = [
        launch.candidates(euler_kernel.ENTRY, (40, actions, 1536), device)[0]["BLOCK_N"] for actions in (132, 1500)
    ]
    assert widths == [64, 32]


def test_held_rows_stay_as_they_are() -> None:
    hidden, weight, bias, x = torch.randn(2, 5, 33), torch.randn(7, 33), torch.randn(7), torch.randn(2, 5, 7)
    hold = torch.tensor([[1.0, 0.75, 0.5, 0.25, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    agree("euler", "project_and_step", hidden, weight, bias, x, 0.25, hold)
    for module in (euler.reference, euler_kernel):
        held = module.project_and_step(hidden, weight, bias, x, 0.25, hold)
        free = module.project_and_step(hidden, weight, bias, x, 0.25)
        assert torch.equal(held[hold == 1], x[hold == 1])
        assert torch.equal(held[hold == 0], free[hold == 0])


def test_linear_activates_the_rounded_product() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    plain = x @ weight.T + bias
    assert torch.allclose(linear.linear(x, weight, bias), plain, atol=1e-5)
    gelu = torch.nn.functional.gelu(plain, approximate="tanh")
    assert torch.allclose(linear.linear(x, weight, bias, "gelu_tanh"), gelu, atol=1e-5)
    assert torch.allclose(linear.linear(x, weight), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize(("rows", "actions"), [(1, 7), (5, 32), (50, 14)])
def test_guide(rows: int, actions: int) -> None:
    x, moved, previous = torch.randn(3, 2, rows, actions)
    for lengths in ([0, 0], [1, 0], [rows // 2, rows], [rows, rows + 3]):
        prefix = torch.tensor(lengths, dtype=torch.int32)[:, None]
        agree("euler", "guide", x, moved, previous, torch.rand(2, rows), prefix, 4.25, 0.8, -0.1)
        agree("euler", "impose", x, previous, prefix)


def test_guide_of_weight_zero_is_the_plain_step() -> None:
    x, moved, previous = torch.randn(3, 1, 5, 7)
    nothing = torch.zeros(1, 1, dtype=torch.int32)
    assert torch.equal(euler.guide(x, moved, previous, torch.zeros(1, 5), nothing, 10.0, 1.0, -0.1), moved)


def test_given_rows_are_those_of_the_previous_chunk() -> None:
    x, moved, previous = torch.randn(3, 2, 5, 7)
    prefix = torch.tensor([[2], [5]], dtype=torch.int32)
    stepped = euler.guide(x, moved, previous, torch.rand(2, 5), prefix, 10.0, 0.5, -0.1)
    imposed = euler.impose(moved, previous, prefix)
    for found in (stepped, imposed):
        assert torch.equal(found[0, :2], previous[0, :2])
        assert torch.equal(found[1], previous[1])
    assert torch.equal(imposed[0, 2:], moved[0, 2:])
