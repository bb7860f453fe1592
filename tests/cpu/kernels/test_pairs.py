"""Products in pairs under the interpreter: rows that fill no tile, both epilogues, and where they are left apart."""

import pytest
import torch
from agreement import SLACK

from bench.case import earned
from innerloop.kernels import launch
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import pairs, reference
from innerloop.kernels.linear import triton as kernel

BF16 = torch.bfloat16
H200 = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
ROWS = (1, 33, 41, 50, 51, 64)


def _tile(columns: int, rows: int = 64) -> Launch:
    return Launch.of(4, 4, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=128)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "tile"), [(96, 32), (72, 32), (64, 64)])
def test_a_gated_unit(rows: int, width: int, tile: int) -> None:
    """A width of no whole tile, a depth of no whole step."""
    x, weight = torch.randn(1, rows, 200).to(BF16), (torch.randn(2 * width, 200) / 8).to(BF16)
    key = ("linear.gated", (rows, width, 1 << 30, 200, 2))
    for kind in ("gelu_tanh", "silu"):
        with launch.dependent_launch(), launch.forced({key: _tile(tile)}), launch.recorded() as used:
            ours = kernel.gated(x, weight, kind)  # type: ignore[arg-type]
        assert {op for op, _ in used} == {"linear.gated"}
        same, truth = (reference.gated(a, w, kind) for a, w in ((x, weight), (x.float(), weight.float())))  # type: ignore[arg-type]
        earned(kind, ours, same, truth, SLACK[BF16])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (0, 1)])
def test_a_rotated_product(rows: int, batch: int, heads: tuple[int, int]) -> None:
    """Against fp32; cache rows beside those of the tokens stay as they were."""
    if rows % batch:
        rows += 1
    tokens, (q, kv), dim, start = rows // batch, heads, 64, 3
    x, weight = torch.randn(batch, tokens, 136).to(BF16), (torch.randn((q + 2 * kv) * dim, 136) / 8).to(BF16)
    angle = torch.randn(batch, tokens, dim // 2)
    around = torch.full((2, batch, start + tokens + 2, kv, dim), float("nan"))

    def run(module: object, given: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
        keys, values = around.clone().to(given.dtype)
        turned = (given, by, angle.cos(), angle.sin(), q, kv, keys, values, start)
        found = module.rotated(*turned)  # type: ignore[attr-defined]
        for cache in (keys, values):
            assert cache[:, :start].isnan().all()
            assert cache[:, start + tokens :].isnan().all()
        return [found, *(cache[:, start : start + tokens] for cache in (keys, values))]

    key = ("linear.rotated", (rows, weight.shape[0] // 2, dim // 2, 136, 2))
    for columns in (16, 32):
        with launch.dependent_launch(), launch.forced({key: _tile(columns)}), launch.recorded() as used:
            ours = run(kernel, x, weight)
        assert {op for op, _ in used} == {"linear.rotated"}
        for three in zip(ours, run(reference, x, weight), run(reference, x.float(), weight.float()), strict=True):
            earned(f"{columns} columns", *three, SLACK[BF16])


def test_outside_a_chain_and_with_many_rows_they_are_two_kernels() -> None:
    weight = torch.randn(16, 32).to(BF16)
    with launch.recorded() as outside:
        kernel.gated(torch.randn(1, 3, 32).to(BF16), weight, "silu")
    with launch.dependent_launch(), launch.recorded() as many:
        kernel.gated(torch.randn(1, 65, 32).to(BF16), weight, "silu")
        kernel.gated(torch.randn(1, 3, 32), weight.float(), "silu")
    for used in (outside, many):
        assert {"activation", "linear.whole", "linear.gated_wide"} <= {op for op, _ in used}


def test_the_expert_s_products_fill_a_device_at_most_once() -> None:
    for rows in (33, 50, 64):
        for table, shape, columns in (
            (pairs.GATED, (rows, 4096, 1 << 30, 1024, 2), 32),
            (pairs.ROTATED, (rows, 1280, 128, 1024, 2), 16),
        ):
            listed = launch.candidates(table, shape, H200)
            assert listed[0]["BLOCK_N"] == columns
            assert launch.candidates(table, (*shape[:4], 4), H200) == [pairs.APART]
    assert launch.candidates(pairs.ROTATED, (50, 1280, 24, 1024, 2), H200) == [pairs.APART]  # halves of no whole tile
