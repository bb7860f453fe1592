"""The product kernel under the interpreter: rows and widths that fill no tile, shares of the inner dimension."""

import pytest
import torch
from agreement import SLACK, agree

from bench.cases import earned
from innerloop.kernels import launch, use_kernels
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import deferred, reference
from innerloop.kernels.linear import triton as kernel

BF16 = torch.bfloat16


def _operands(
    rows: int, columns: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, rows, inner).to(dtype), torch.randn(columns, inner).to(dtype), torch.randn(columns).to(dtype)


def _tile(split: int, bulk: int) -> Launch:
    return Launch.of(4, 1, BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, SPLIT=split, BULK=bulk)


@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 5, 12), (33, 70, 44), (20, 32, 588)])
def test_inner_widths_that_are_no_multiple_of_eight(rows: int, columns: int, inner: int) -> None:
    x, weight, bias = _operands(rows, columns, inner, BF16)
    with launch.recorded() as used:
        agree("linear", "linear", x, weight, bias)
        agree("linear", "linear", x, weight)
    assert {op for op, _ in used} == {"linear.unaligned"}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bulk", [0, 1])
@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_shares_add_up(split: int, bulk: int, dtype: torch.dtype) -> None:
    x, weight, bias = _operands(19, 70, 104, dtype)
    with launch.forced({("linear.deferred", (19, 70, 104, dtype.itemsize)): _tile(split, bulk)}):
        shares, left = kernel.deferred(x, weight, bias)
    assert shares.shape == (split, 1, 19, 70)
    assert left is bias
    truth = reference.linear(x.float(), weight.float(), bias.float())
    ours = shares.float().sum(0) + bias.float()
    allowed = reference.linear(x, weight, bias)
    earned("shares", ours, allowed, truth, SLACK[dtype] * split)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_shares_of_the_library_add_up(split: int) -> None:
    x, weight, _ = _operands(6, 10, 64, torch.float32)
    with launch.forced({("linear.deferred", (6, 10, 64, 4)): Launch.of(0, SPLIT=split)}):
        shares, left = kernel.deferred(x, weight)
    assert (len(shares), left) == (split, None)
    assert torch.allclose(shares.sum(0), reference.linear(x, weight), atol=1e-5)


def test_one_share_holds_everything_unless_fused() -> None:
    x, weight, bias = _operands(3, 4, 8, torch.float32)
    for kind in ("reference", "operators"):
        with use_kernels(kind):
            shares, left = deferred(x, weight, bias)
        assert left is None
        assert torch.equal(shares, reference.linear(x, weight, bias)[None])


def test_a_split_fills_a_device_at_most_once() -> None:
    limits = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
    for shape in ((512, 1152, 4304, 2), (576, 2048, 2048, 2), (712, 2048, 16384, 2), (10, 64, 64, 2)):
        for choice in launch.candidates(kernel.DEFERRED, shape, limits):
            split = choice["SPLIT"]
            assert split == 1 or shape[2] >= 1024 * split
            if not choice.warps:
                assert shape[2] % split == 0
                continue
            tiles = -(-shape[0] // choice["BLOCK_M"]) * -(-shape[1] // choice["BLOCK_N"])
            assert tiles * split <= 132
