"""Products in warp group tiles, run by the emulator: every kind of tile, at sizes that fill none, in random orders."""

import pytest
import torch
from emulated import emulated, needs_compiler

from bench.case import earned
from innerloop.kernels import activation
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.launch import Launch, Limits
from innerloop.kernels.linear import reference, rings

pytestmark = needs_compiler
BF16 = torch.bfloat16
tile = rings.tile


def _check(
    choice: Launch,
    rows: int,
    columns: int,
    inner: int,
    kind: Activation | None = None,
    gated: bool = False,
    biased: bool = False,
    programs: int = 132,
    seed: int = 1,
) -> None:
    assert rings.suits(choice, rows, columns, inner, Limits("", 90, programs, 232448, 0), gated)
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inner).to(BF16), torch.randn(columns * (2 if gated else 1), inner)
    weight = (weight * inner**-0.5).to(BF16)
    bias = torch.randn(columns).to(BF16) if biased else None
    with emulated(programs, seed):
        shares = rings.product(x, weight, bias, choice, kind, gated)

    def meant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if gated:
            return activation.glu(reference.linear(x, weight), kind or "silu")
        return reference.linear(x, weight, bias, kind)

    truth = meant(x.float(), weight.float(), None if bias is None else bias.float())
    slack = len(shares) * 2.0**-9 if len(shares) > 1 else 2e-5  # each share is rounded to 16 bits
    earned("rings", shares.float().sum(0), meant(x, weight, bias), truth, slack)


@pytest.mark.parametrize("kind", [None, "gelu_tanh", "silu", "relu"])
def test_one_group(kind: Activation | None) -> None:
    """Rows, columns and a depth that no whole tile or step makes up; more steps than places."""
    _check(tile(1, 32), 41, 200, 1240, kind, biased=True)


def test_several_tiles_of_rows() -> None:
    _check(tile(2, 96), 300, 208, 392, "gelu_tanh", biased=True)


@pytest.mark.parametrize("seed", range(1, 6))
def test_shares_of_a_depth_that_they_do_not_divide(seed: int) -> None:
    _check(tile(1, 64, split=3), 64, 136, 1096, seed=seed)
    _check(tile(3, 80, split=4), 182, 160, 1160, seed=seed)


@pytest.mark.parametrize("width", [64, 160])
def test_gated_units(width: int) -> None:
    _check(tile(3, width), 182, 200, 584, "silu", gated=True)


@pytest.mark.parametrize(("groups", "depth"), [(1, 2), (1, 4), (2, 2)])
def test_groups_that_share_the_steps_of_a_tile(groups: int, depth: int) -> None:
    """Also where there are fewer steps than groups, in shares, gated."""
    _check(tile(groups, 48, depth=depth), 41 * groups, 136, 1448, "gelu_tanh", biased=True)
    _check(tile(groups, 32, split=2, depth=depth), 41 * groups, 136, 200)
    _check(tile(groups, 64, depth=depth), 41 * groups, 72, 1096, "silu", gated=True)


def test_rows_that_do_not_begin_at_sixteen_bytes() -> None:
    x, weight = torch.randn(41, 328).to(BF16)[:, 1:321], torch.randn(64, 320).to(BF16)
    with emulated():
        ours = rings.product(x, weight, None, tile(1, 32), None)[0]
    earned("moved", ours, reference.linear(x, weight), reference.linear(x.float(), weight.float()), 2e-5)
