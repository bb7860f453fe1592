"""The action expert over dense weights: own tiles against fp32, its chain beside launches one after another, late producers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from few_rows import ON_HOPPER
from late import Call, behind_delayed, captured, one_after_another, starts_early, unguarded

from bench.case import earned
from bench.expert import Subject
from innerloop.blocks.expert import EPS
from innerloop.blocks.sizes import DecoderSizes
from innerloop.kernels import attention, launch, linear, norm, skinny, use_kernels
from innerloop.kernels.linear import reference

pytestmark = ON_HOPPER
BF16 = torch.bfloat16
WIDTH, MLP, HEADS, DIM, START = 1024, 4096, 8, 256, 576
SIZES = DecoderSizes(WIDTH, 2, MLP, HEADS, 1, DIM)
ROWS = (33, 41, 50, 51, 64)
PAIRS = (
    "norm-qkv",
    "qkv-attention",
    "keys-attention",
    "attention-out",
    "shares-norm",
    "norm-unit",
    "unit-down",
    "shares-sum",
)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def _each_candidate(call: Callable[[], Any], op: str) -> list[tuple[str, Any]]:
    """What every launch of one op gives."""
    with launch.dependent_launch(), launch.recorded() as used:
        call()
    found = []
    for key, table in used.items():
        for choice in launch.candidates(table, key[1], launch.limits(torch.device("cuda", 0))) if key[0] == op else ():
            with launch.dependent_launch(), launch.forced({key: choice}):
                found.append((f"{choice}", call()))
    assert len(found) > 1
    return found


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("rows", ROWS)
def test_a_gated_unit_against_fp32(rows: int) -> None:
    torch.manual_seed(rows)
    for width, inner in ((MLP, WIDTH), (200, 1032)):
        x, weight = _random(1, rows, inner), _random(2 * width, inner, scale=inner**-0.5)
        same = reference.gated(x, weight, "gelu_tanh")
        truth = reference.gated(x.float(), weight.float(), "gelu_tanh")
        for label, ours in _each_candidate(lambda x=x, w=weight: linear.gated(x, w, "gelu_tanh"), "linear.gated"):  # type: ignore[misc]
            earned(label, ours, same, truth)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_rotated_product_against_fp32(rows: int, batch: int) -> None:
    torch.manual_seed(rows)
    tokens = rows // batch
    x, weight = _random(batch, tokens, WIDTH), _random((HEADS + 2) * DIM, WIDTH, scale=WIDTH**-0.5)
    angle = torch.randn(batch, tokens, DIM // 2, device="cuda")

    def run(call: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
        caches = torch.full((2, batch, tokens + 9, 1, DIM), torch.nan, dtype=given[0].dtype, device="cuda")
        q = call(*given, angle.cos(), angle.sin(), HEADS, 1, *caches, 5)
        assert caches[:, :, :5].isnan().all()
        assert caches[:, :, 5 + tokens :].isnan().all()
        return [q, *caches[:, :, 5 : 5 + tokens]]

    same, truth = run(reference.rotated, x, weight), run(reference.rotated, x.float(), weight.float())
    for label, ours in _each_candidate(lambda: run(linear.rotated, x, weight), "linear.rotated"):
        for three in zip(ours, same, truth, strict=True):
            earned(label, *three)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("rows", ROWS)
def test_shares_and_attention_against_fp32(rows: int) -> None:
    torch.manual_seed(rows)
    for inner in (HEADS * DIM, MLP):
        x, weight = _random(1, rows, inner), _random(WIDTH, inner, scale=inner**-0.5)
        same, truth = reference.linear(x, weight), reference.linear(x.float(), weight.float())
        for label, (shares, _) in _each_candidate(
            lambda x=x, w=weight: linear.deferred(x, w),  # type: ignore[misc]
            "linear.chained_shares",
        ):
            earned(label, shares.float().sum(0), same, truth, len(shares) * 2.0**-9)
    q, (k, v) = _random(1, rows, HEADS, DIM), _random(2, 1, START + rows, 1, DIM)
    valid = (torch.arange(START + rows, device="cuda") % 300 > 20).int()[None]
    given = (valid, DIM**-0.5)
    with use_kernels("reference"):
        same = attention.attention(q, k, v, *given)
        truth = attention.attention(q.float(), k.float(), v.float(), *given)
    found = _each_candidate(lambda: attention.attention(q, k, v, *given), "attention.few")
    for start in (START, 0, 100):
        found += _each_candidate(lambda s=start: attention.continued(q, k, v, *given, s), "attention.ahead")  # type: ignore[misc]
    for label, ours in found:
        earned(label, ours, same, truth)


def _consumers(rows: int) -> dict[str, tuple[torch.Tensor, Call]]:
    """Every kernel of a layer: what its predecessor leaves for it, and the call."""
    torch.manual_seed(rows)
    shapes = {
        "qkv": ((HEADS + 2) * DIM, WIDTH),
        "out": (WIDTH, HEADS * DIM),
        "unit": (2 * MLP, WIDTH),
        "down": (WIDTH, MLP),
    }
    weight = {name: _random(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    x, (gate, scale, shift) = _random(1, rows, WIDTH), _random(3, WIDTH).float()
    q, (k, v) = _random(1, rows, HEADS, DIM), _random(2, 1, START + rows, 1, DIM)
    valid, rotary = (
        torch.ones(1, START + rows, dtype=torch.int32, device="cuda"),
        torch.randn(1, rows, DIM, device="cuda"),
    )
    cos, sin = (t.contiguous() for t in rotary.chunk(2, dim=-1))

    def turned(y: torch.Tensor) -> Any:
        q = linear.rotated(y, weight["qkv"], cos, sin, HEADS, 1, k, v, START)
        return q, k[:, START:], v[:, START:]

    return {
        "norm-qkv": (_random(1, rows, WIDTH), turned),
        "qkv-attention": (
            _random(1, rows, HEADS, DIM),
            lambda q: attention.continued(q, k, v, valid, DIM**-0.5, START),
        ),
        "keys-attention": (k, lambda late: attention.continued(q, late, v, valid, DIM**-0.5, 0)),
        "attention-out": (_random(1, rows, HEADS * DIM), lambda y: linear.deferred(y, weight["out"])[0]),
        "shares-norm": (_random(8, 1, rows, WIDTH), lambda d: norm.gated_add_rms_norm(x, d, gate, scale, shift, EPS)),
        "norm-unit": (_random(1, rows, WIDTH), lambda y: linear.gated(y, weight["unit"], "gelu_tanh")),
        "unit-down": (_random(1, rows, MLP), lambda y: linear.deferred(y, weight["down"])[0]),
        "shares-sum": (_random(8, 1, rows, WIDTH), lambda d: norm.gated_add(x, d, gate)),
    }


@pytest.mark.parametrize("name", PAIRS)
def test_a_late_producer_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured; without its wait the second kernel goes wrong, at one number of rows at least."""
    early = []
    for rows in (33, 50):
        with monkeypatch.context() as patched:
            early.append(starts_early(*_consumers(rows)[name], patched))
    assert any(early)


@pytest.mark.parametrize("rows", [33, 50, 64])
@pytest.mark.parametrize("given", [None, 7])
def test_the_expert_against_fp32(rows: int, given: int | None) -> None:
    subject = Subject(rows, START, SIZES)
    prefix = None if given is None else torch.tensor([[given]], dtype=torch.int32, device="cuda")
    with use_kernels("reference"):
        same = subject.forward(subject.dense, subject.x, prefix)
        subject.dense.float()
        keys, values = subject.cache.keys.float(), subject.cache.values.float()
        wide = type(subject.cache)(keys, values, subject.cache.valid)
        truth = subject.dense(subject.x.float(), subject.norms(prefix), wide, subject.rotary, START, prefix)
        subject.dense.bfloat16()
    with launch.recorded() as used:
        ours = subject.forward(subject.dense, subject.x, prefix)
    assert {"linear.rotated", "linear.gated", "linear.chained_shares", "norm", "attention.ahead"} <= {
        op for op, _ in used
    }
    earned(f"{rows} rows", ours, same, truth, 2.0**-8)


@pytest.mark.parametrize("given", [None, 7])
def test_a_solver_has_the_same_bits_without_overlap(given: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The few-row kernels of a step stand before and after the chain's."""
    subject = Subject(50, START, SIZES)
    prefix = None if given is None else torch.tensor([[given]], dtype=torch.int32, device="cuda")

    def solve() -> torch.Tensor:
        with skinny.chain():
            return subject.solve(subject.dense, 3, prefix)

    graph, overlapped = captured(solve)
    one_after_another(monkeypatch)
    for seed in range(50):
        torch.manual_seed(seed)
        subject.noise.copy_(torch.randn_like(subject.noise))
        graph.replay()
        assert torch.equal(overlapped, subject.solve(subject.dense, 3, prefix))


def test_every_pair_of_the_expert_with_late_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's result reaches the next through a copy that lets that one start, sleeps, and then writes."""
    subject = Subject(50, START, SIZES)

    def run() -> torch.Tensor:
        return subject.forward(subject.dense, subject.x)

    with monkeypatch.context() as plain:
        one_after_another(plain)
        expected = run()
    for module, names in (
        (linear, ("rotated", "gated", "deferred")),
        (norm, ("modulated_rms_norm", "gated_add_rms_norm", "gated_add")),
        (attention, ("continued",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, behind_delayed(getattr(module, name)))
    graph, result = captured(run)
    for _ in range(20):
        graph.replay()
        assert torch.equal(expected, result)
    unguarded(monkeypatch)
    graph, result = captured(run)
    graph.replay()
    assert not torch.equal(expected, result)
