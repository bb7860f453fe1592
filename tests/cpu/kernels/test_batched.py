"""Products of several layers in one kernel, interpreted: rows and columns off the tiles, a given result with gaps."""

import pytest
import torch
from agreement import SLACK, agree

from bench.case import earned
from innerloop.kernels import launch, linear
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import batch, reference
from innerloop.kernels.linear import triton as kernel

BF16 = torch.bfloat16
H200 = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _operands(layers: int, rows: int, columns: int, inner: int, dtype: torch.dtype = BF16) -> Operands:
    x, weight = torch.randn(layers, rows, inner), torch.randn(layers * columns, inner)
    return x.to(dtype), weight.to(dtype), torch.randn(layers * columns).to(dtype)


def _tile(rows: int, rest: int, columns: int, inner: int) -> Launch:
    return Launch.of(4, 1, BLOCK_M=rows, BLOCK_R=rest, BLOCK_N=columns, BLOCK_K=inner)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 63, 169, 192])
def test_rows_off_the_tiles(layers: int, rows: int) -> None:
    operands = _operands(layers, rows, 80, 72)
    key = ("linear.batched", (layers, rows, 80, 72, 2))
    for choice in (_tile(128, 64, 64, 32), _tile(64, 0, 32, 64), _tile(16, 16, 128, 16)):
        with launch.forced({key: choice}):
            agree("linear", "batched", *operands)


def test_every_choice_of_the_device() -> None:
    for rows in (7, 192):
        operands, shape = _operands(2, rows, 200, 136), (2, rows, 200, 136, 2)
        for choice in launch.candidates(batch.TABLE, shape, H200):
            with launch.forced({("linear.batched", shape): choice}):
                agree("linear", "batched", *operands)
                agree("linear", "batched", *operands, None, "gelu", roundings=2)


@pytest.mark.parametrize("choice", [batch.LIBRARY, _tile(16, 16, 32, 16)])
@pytest.mark.parametrize("beside", [False, True])
def test_a_given_result_with_gaps(beside: bool, choice: Launch) -> None:
    """Wider steps from layer to layer and rows that stay as they are; or layer beside layer, as in the memory of a DiT."""
    x, weight, bias = _operands(3, 19, 48, 40)
    memory = torch.full((25, 3, 48) if beside else (3, 25, 48), 7.0, dtype=BF16)
    layers = memory.transpose(0, 1) if beside else memory
    out = layers[:, :19]
    with launch.forced({("linear.batched", (3, 19, 48, 40, 2)): choice}):
        assert kernel.batched(x, weight, bias, out) is out
    assert (layers[:, 19:] == 7.0).all()
    truth = reference.batched(x.float(), weight.float(), bias.float())
    earned("rows", out, reference.batched(x, weight, bias), truth, SLACK[BF16])


def test_the_reference_fills_a_given_result() -> None:
    x, weight, bias = _operands(2, 5, 6, 8, torch.float32)
    memory = torch.zeros(2, 9, 6)
    linear.batched(x, weight, bias, memory[:, :5])
    for layer in range(2):
        own = slice(6 * layer, 6 * layer + 6)
        assert torch.allclose(memory[layer, :5], reference.linear(x[layer], weight[own], bias[own]), atol=1e-5)
    assert (memory[:, 5:] == 0).all()


@pytest.mark.parametrize(("inner", "dtype"), [(44, BF16), (40, torch.float32)])
def test_what_bulk_copies_cannot_read_goes_to_the_library(inner: int, dtype: torch.dtype) -> None:
    shape = (3, 192, 48, inner, dtype.itemsize)
    assert launch.candidates(batch.TABLE, shape, H200) == [batch.LIBRARY]
    agree("linear", "batched", *_operands(3, 19, 48, inner, dtype))


def test_operands_at_odd_addresses_go_to_the_library() -> None:
    x, weight, bias = _operands(2, 9, 16, 32)
    shifted = torch.empty(x.numel() + 1, dtype=BF16)[1:].view_as(x).copy_(x)
    with launch.forced({("linear.batched", (2, 9, 16, 32, 2)): _tile(16, 0, 16, 16)}):
        for one in (shifted, x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert torch.equal(kernel.batched(one, weight, bias), reference.batched(x, weight, bias))


def test_many_rows_go_to_the_library() -> None:
    assert launch.candidates(batch.TABLE, (36, 192, 1024, 2560, 2), H200)[0] == batch.TABLE.rows[90][0]
    assert launch.candidates(batch.TABLE, (36, 1536, 1024, 2560, 2), H200) == [batch.LIBRARY]
