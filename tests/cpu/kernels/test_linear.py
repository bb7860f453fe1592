"""The product kernel under the interpreter: rows and widths that fill no tile, shares of the inner dimension."""

import pytest
import torch
from agreement import SLACK, agree

from bench.case import earned
from innerloop.kernels import compile, launch, use_kernels
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import deferred, pairs, reference, rings
from innerloop.kernels.linear import triton as kernel

BF16 = torch.bfloat16
NEEDS_NVRTC = pytest.mark.skipif(not compile.available(), reason="needs NVRTC: without it other tiles are chosen")
H200 = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
CPU = launch.limits(torch.device("cpu"))


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
    for shape in ((512, 1152, 4304, 2), (576, 2048, 2048, 2), (712, 2048, 16384, 2), (10, 64, 64, 2)):
        for choice in launch.candidates(kernel.DEFERRED, shape, H200):
            split = choice["SPLIT"]
            if rings.is_rings(choice):
                assert rings.programs(choice, shape[0], shape[1], gated=False) <= 132
                continue
            assert split == 1 or shape[2] >= 1024 * split
            if not choice.warps:
                assert shape[2] % split == 0
                continue
            tiles = -(-shape[0] // choice["BLOCK_M"]) * -(-shape[1] // choice["BLOCK_N"])
            assert tiles * split <= 132


@pytest.mark.parametrize("rows", [1, 7, 16, 41, 48, 63, 64])
@pytest.mark.parametrize(("columns", "activation"), [(32, None), (64, "gelu_tanh")])
def test_few_rows_in_a_chain(rows: int, columns: int, activation: Activation | None) -> None:
    """Tiles of the table: a width of no whole tile, a depth of no whole step, with and without a bias."""
    x, weight, bias = _operands(rows, 136, 264, BF16)
    tile = Launch.of(4, 4, BLOCK_M=64, BLOCK_N=columns, BLOCK_K=128, SPLIT=1, BULK=1)
    assert tile in kernel.CHAINED.rows[90]
    given: dict[launch.Key, Launch] = {("linear.chained", (rows, 136, 264, 2)): tile}
    for epilogue, added in ((activation, bias), (activation, None), (None, bias)):
        with launch.dependent_launch(), launch.forced(given), launch.recorded() as used:
            ours = kernel.linear(x, weight, added, epilogue)
        assert {op for op, _ in used} == {"linear.chained"}
        truth = reference.linear(x.float(), weight.float(), None if added is None else added.float(), epilogue)
        earned("few rows", ours, reference.linear(x, weight, added, epilogue), truth, SLACK[BF16])


@pytest.mark.parametrize("rows", [1, 41, 64])
@pytest.mark.parametrize(("inner", "split"), [(1096, 3), (1096, 4), (1288, 5)])
def test_shares_of_few_rows_in_a_chain(rows: int, inner: int, split: int) -> None:
    """Nine steps or eleven, so the last share is shorter."""
    x, weight, bias = _operands(rows, 72, inner, BF16)
    tile = Launch.of(4, 4, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, SPLIT=split, BULK=1)
    assert tile in kernel.CHAINED_SHARES.rows[90]
    with launch.dependent_launch(), launch.forced({("linear.chained_shares", (rows, 72, inner, 2)): tile}):
        shares, left = kernel.deferred(x, weight, bias)
    assert shares.shape == (split, 1, rows, 72)
    assert left is bias
    ours = shares.float().sum(0) + bias.float()
    truth = reference.linear(x.float(), weight.float(), bias.float())
    earned("shares", ours, reference.linear(x, weight, bias), truth, SLACK[BF16] * split)


def test_only_few_rows_of_16_bits_in_a_chain_leave_the_library() -> None:
    for rows, dtype, chained in ((64, BF16, True), (65, BF16, False), (64, torch.float32, False)):
        x, weight, bias = _operands(rows, 8, 16, dtype)
        with launch.recorded() as outside:
            kernel.linear(x, weight, bias, "gelu_tanh")
            kernel.deferred(x, weight)
        with launch.dependent_launch(), launch.recorded() as inside:
            kernel.linear(x, weight, bias)
            kernel.deferred(x, weight)
        assert {op for op, _ in outside} == {"linear.whole", "linear.deferred"}
        assert {op for op, _ in inside} == (
            {"linear.chained", "linear.chained_shares"} if chained else {"linear.whole", "linear.deferred"}
        )
        assert not any(launch.candidates(table, key[1], CPU)[0].warps for key, table in outside.items())


@NEEDS_NVRTC
@pytest.mark.parametrize(
    ("columns", "inner", "width", "shares"),
    [(1536, 1536, 24, 3), (6144, 1536, 48, None), (1536, 6144, 24, 3), (4608, 1536, 48, None), (768, 768, 24, 3), (768, 3072, 24, 6)],
)  # fmt: skip
def test_choices_in_a_chain(columns: int, inner: int, width: int, shares: int | None) -> None:
    """Of all SMs half or more, where a wide tile has as many; in shares of 256 or more."""
    shape = (41, columns, inner, 2)
    assert launch.candidates(kernel.CHAINED, shape, H200)[0]["WIDTH"] == width
    if shares is not None:
        assert launch.candidates(kernel.CHAINED_SHARES, shape, H200)[0]["SPLIT"] == shares


@NEEDS_NVRTC
def test_choices_of_gated_units() -> None:
    """All rows in one tile; more columns a program where these would need more programs than there are multiprocessors."""
    for rows, columns, width in ((192, 9728, 160), (169, 6144, 96), (560, 16384, None), (1, 9728, None)):
        choice = launch.candidates(pairs.WIDE, (rows, columns, 1 << 30, 2560, 2), H200)[0]
        assert dict(choice.sizes).get("WIDTH") == width, rows


@NEEDS_NVRTC
def test_choices_out_of_a_chain() -> None:
    """Shares by what nearly fills a device; the library's elsewhere, as measured: warps, width of a tile of rings, shares."""
    measured = {
        (196, 1024, 1024): (4, None, 2),
        (196, 1024, 4096): (6, 128, 4),
        (256, 1024, 4096): (6, 128, 4),
        (512, 1024, 1024): (6, 128, 2),
        (512, 1024, 4096): (6, 128, 2),
        (768, 1024, 4096): (0, None, 2),
        (192, 2560, 4096): (6, 128, 2),
        (192, 2560, 9728): (14, 80, 4),
        (300, 2560, 9728): (0, None, 2),
        (169, 2048, 2048): (6, 128, 2),
        (169, 2048, 6144): (14, 80, 4),
        (256, 1152, 1152): (6, 144, 4),
        (256, 1152, 4304): (6, 144, 4),
        (512, 1152, 1152): (6, 144, 2),
        (512, 1152, 4304): (10, 144, 4),
        (768, 1152, 1152): (0, None, 1),
        (576, 2048, 2048): (0, None, 2),
        (41, 1536, 1536): (0, None, 1),
    }
    for shape, expected in measured.items():
        choice = launch.candidates(kernel.DEFERRED, (*shape, 2), H200)[0]
        assert (choice.warps, dict(choice.sizes).get("WIDTH"), choice["SPLIT"]) == expected, shape
        assert not launch.candidates(kernel.DEFERRED, (*shape, 4), H200)[0].warps


@NEEDS_NVRTC
def test_whole_products_of_one_tile_of_rows() -> None:
    widths = {(192, 6144, 2560): 48, (169, 6144, 2048): 48, (169, 8192, 2048): 64, (169, 4096, 2048): 40}
    for shape in ((196, 3072, 1024), (196, 4096, 1024), (512, 3456, 1152), (169, 2048, 2048)):
        widths[shape] = 0  # the library's
    for shape, width in widths.items():
        choice = launch.candidates(kernel.WHOLE, (*shape, 2), H200)[0]
        assert dict(choice.sizes).get("WIDTH", 0) == width, shape


@pytest.mark.parametrize(("kept", "inner"), [(19, 40), (24, 40), (19, 12)])
def test_a_product_into_given_rows(kept: int, inner: int) -> None:
    """Rows one after another, rows of several robots with room between, and an inner width the library cannot read."""
    x, weight, bias = _operands(19, 48, inner, BF16)
    x = torch.cat([x, x.flip(1)])
    memory = torch.full((2, kept, 48), 7.0, dtype=BF16)
    kernel.into(x, weight, bias, memory[:, :19])
    assert (memory[:, 19:] == 7.0).all()
    truth = reference.linear(x.float(), weight.float(), bias.float())
    earned("rows", memory[:, :19], reference.linear(x, weight, bias), truth, SLACK[BF16])
