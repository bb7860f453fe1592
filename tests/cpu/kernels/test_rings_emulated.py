"""Products in warp group tiles, run by the emulator: every kind of tile, at sizes that fill none, in random orders."""

import pytest
import torch
from emulated import emulated, needs_compiler

from bench.cases import earned
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


def test_one_program_a_cluster() -> None:
    _check(tile(1, 32, room=40), 41, 64, 320)


@pytest.mark.parametrize("kind", [None, "gelu_tanh", "silu"])
def test_rows_shared_across(kind: Activation | None) -> None:
    _check(tile(1, 64, 1, 2, room=50), 41, 200, 328, kind, biased=True)


def test_weights_further_ahead_than_rows() -> None:
    _check(tile(1, 48, 1, 4, room=60, ahead=3), 41, 216, 1000, biased=True)


def test_shares_of_a_depth_that_they_do_not_divide() -> None:
    _check(tile(1, 64, 1, 2, 3, room=70, ahead=4), 64, 136, 1096)


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_cluster_of_rows_and_columns(seed: int) -> None:
    _check(tile(2, 64, 2, 2, room=75), 300, 136, 456, biased=True, seed=seed)


def test_weights_shared_down() -> None:
    _check(tile(1, 96, 4, 1, room=100), 196, 208, 392, "gelu_tanh", biased=True)


@pytest.mark.parametrize(("width", "across"), [(64, 4), (160, 2)])
def test_gated_units(width: int, across: int) -> None:
    _check(tile(3, width, 1, across, room=140), 182, 200, 584, "silu", gated=True)


def test_three_groups_in_shares() -> None:
    _check(tile(3, 80, 1, 4, 4, room=110), 182, 640, 1160)


@pytest.mark.parametrize("seed", range(1, 4))
def test_several_tiles_a_program(seed: int) -> None:
    """More tiles than programs, in shares, in clusters, gated: rings go on from one tile to the next."""
    _check(tile(1, 64, 1, 2, room=60, out=64), 200, 520, 328, biased=True, programs=6, seed=seed)
    _check(tile(1, 48, 2, 2, 2, room=50, ahead=3, out=48), 300, 200, 1000, programs=8, seed=seed)
    _check(tile(2, 64, 2, 1, room=85, out=32), 300, 200, 200, "silu", gated=True, programs=4, seed=seed)


def test_rows_that_do_not_begin_at_sixteen_bytes() -> None:
    x, weight = torch.randn(41, 328).to(BF16)[:, 1:321], torch.randn(64, 320).to(BF16)
    with emulated():
        ours = rings.product(x, weight, None, tile(1, 32, room=40), None)[0]
    earned("moved", ours, reference.linear(x, weight), reference.linear(x.float(), weight.float()), 2e-5)


@pytest.mark.parametrize(("groups", "depth"), [(1, 2), (1, 4), (2, 2)])
def test_groups_that_share_the_steps_of_a_tile(groups: int, depth: int) -> None:
    """Also where there are fewer steps than groups, in shares, in clusters, gated."""
    _check(tile(groups, 48, room=130, depth=depth), 41 * groups, 136, 456, "gelu_tanh", biased=True)
    _check(tile(groups, 32, 1, 2, 2, room=190, ahead=8, depth=depth), 41 * groups, 136, 200)
    _check(tile(groups, 64, room=150, depth=depth), 41 * groups, 72, 712, "silu", gated=True)
