"""Products in warp group tiles on a CUDA device: every listed tile at sizes that fill none, epilogues, shares, chains."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from few_rows import ON_HOPPER
from late import captured, starts_early

from bench.case import earned
from innerloop.kernels import activation, launch, linear, norm
from innerloop.kernels.compile import compiled_with
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import pairs, reference, rings
from innerloop.kernels.linear import triton as tables

pytestmark = ON_HOPPER
BF16 = torch.bfloat16
CHOICES = [
    (table.op, choice)
    for table in (tables.WHOLE, tables.DEFERRED, tables.CHAINED, tables.CHAINED_SHARES, pairs.WIDE, pairs.GATED)
    for choice in dict.fromkeys(table.rows[90])
    if rings.is_rings(choice)
]
ROWS = (1, 41, 64, 65, 100, 182, 192, 196, 300, 512, 576)
SIZES = ((200, 72), (1000, 1096), (640, 2560), (2560, 4096), (776, 1000), (16384, 1000))


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def _names(entry: object) -> str:
    if not isinstance(entry, Launch):
        return str(entry)
    depth, rows = entry["DEPTH"], rings.groups_of(entry) * 64
    return f"{rows}x{entry['WIDTH']} of {entry['SPLIT']} by {depth}"


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(("op", "choice"), CHOICES, ids=_names)
def test_against_fp32(op: str, choice: Launch) -> None:
    """Rows and columns of no whole tile, a depth of no whole step; alone and in a chain the same bits."""
    gated, tried = op in (pairs.WIDE.op, pairs.GATED.op), 0
    for rows in ROWS:
        for columns, inner in SIZES:
            if not rings.suits(choice, rows, columns, inner, launch.limits(torch.device("cuda")), gated):
                continue
            tried += 1
            torch.manual_seed(rows)
            x = _random(rows, inner)
            weight = _random(columns * (2 if gated else 1), inner, scale=inner**-0.5)
            bias = None if gated or choice["SPLIT"] > 1 else _random(columns)
            kind = "silu" if gated else "gelu_tanh" if rows % 2 and bias is not None else None
            out = rings.product(x, weight, bias, choice, kind, gated)
            with launch.dependent_launch():
                assert torch.equal(out, rings.product(x, weight, bias, choice, kind, gated))
            truth, same = (_meant(*t, kind, gated) for t in (_wide(x, weight, bias), (x, weight, bias)))
            slack = choice["SPLIT"] * 2.0**-9 if choice["SPLIT"] > 1 else 2e-5  # each share is rounded to 16 bits
            earned(f"{_names(choice)} {rows}x{columns}x{inner}", out.float().sum(0), same, truth, slack)
    assert tried


def _wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return x.float(), weight.float(), None if bias is None else bias.float()


def _meant(x, weight, bias, kind, gated) -> torch.Tensor:  # type: ignore[no-untyped-def]
    if gated:
        return activation.glu(reference.linear(x, weight), kind)
    return reference.linear(x, weight, bias, kind)


def test_captured_it_reads_what_lies_there() -> None:
    """A tensor map holds an address: other values in the same memory are read, in graphs of many launches too."""
    choice = tables.MANY_ROWS[0]
    x, weight = _random(182, 512), _random(640, 512, scale=512**-0.5)
    graph, outs = captured(lambda: [rings.product(x, weight, None, choice, None) for _ in range(50)])
    for _ in range(3):
        x.normal_()
        graph.replay()
        truth = x.float() @ weight.float().T
        earned("replayed", outs[0][0], reference.linear(x, weight), truth)
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("rows", [41, 182])
def test_a_late_producer_is_waited_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no rows before they are written, and writes nothing that is still read; without its wait it does."""
    torch.manual_seed(rows)
    listed = (tables.CHAIN, tables.CHAIN_SHARES) if rows <= 64 else (tables.MANY_ROWS, tables.DEEP)
    weight, early = _random(1536, 2048, scale=2048**-0.5), []
    for choice in (listed[0][0], listed[1][0]):
        with monkeypatch.context() as patched:
            early.append(
                starts_early(_random(rows, 2048), lambda x, c=choice: rings.product(x, weight, None, c, None), patched)
            )
    assert any(early)


def test_its_own_lateness_is_waited_for() -> None:
    """The norm behind it starts early and still adds the shares that are stored late."""
    weight, x, residual = _random(1536, 6144, scale=6144**-0.5), _random(41, 6144), _random(1, 41, 1536)
    choice = tables.CHAIN_SHARES[0]

    def both(delay: int) -> torch.Tensor:
        with launch.dependent_launch():
            with compiled_with(**({"DELAY": delay} if delay else {})):
                shares = rings.product(x, weight, None, choice, None)
            return norm.add_layer_norm(residual, shares[:, None], None, None, 1e-5)[1]

    expected = both(0).clone()
    graph, result = captured(lambda: both(50))
    for _ in range(10):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)


def test_the_ops_take_the_tiles_they_are_told_to() -> None:
    """linear, deferred and gated with a bias, more than two dimensions, and rows that do not begin at 16 bytes."""
    x, bias = _random(2, 96, 2568)[..., 4:2564], _random(640)
    weight, gates = _random(640, 2560, scale=0.02), _random(2 * 480, 2560, scale=0.02)
    keys = {
        ("linear.whole", (192, 640, 2560, 2)): tables.MANY_ROWS[1],
        ("linear.deferred", (192, 640, 2560, 2)): tables.DEEP[0],
        ("linear.gated_wide", (192, 480, 1 << 30, 2560, 2)): rings.tile(3, 160),
    }
    with launch.forced(keys), launch.recorded() as used:
        whole = linear.linear(x, weight, bias)
        shares, left = linear.deferred(x, weight, bias)
        unit = linear.gated(x, gates, "silu")
    assert keys.keys() <= used.keys()
    assert left is bias
    assert shares.shape == (4, 2, 96, 640)
    truth = reference.linear(x.float(), weight.float(), bias.float())
    earned("whole", whole, reference.linear(x, weight, bias), truth)
    earned("shares", shares.float().sum(0) + bias.float(), reference.linear(x, weight, bias), truth, 2.0**-7)
    gate = activation.glu(reference.linear(x.float(), gates.float()), "silu")
    earned("gated", unit, reference.gated(x, gates, "silu"), gate)
