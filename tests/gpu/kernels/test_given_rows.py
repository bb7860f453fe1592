"""Rows that real-time chunking gives, in the few-row kernels on a GPU: their own tables, no capture for another length."""

import pytest
import torch
from few_rows import DIM, EPS, HEADS, MLP, ON_HOPPER, SIZES, Layer, Solver, error, second_rows

from innerloop.kernels.skinny import cuda, reference
from innerloop.kernels.skinny.packing import pack

pytestmark = [ON_HOPPER, pytest.mark.usefixtures("poisoned_allocations")]


@pytest.mark.parametrize(("batch", "tokens", "keys"), [*SIZES, (4, 16, 300), (64, 1, 65)])
def test_rows_below_a_prefix_take_the_second_row(batch: int, tokens: int, keys: int) -> None:
    layer = Layer(batch, tokens, keys)
    scale, shift, gate = second_rows(layer.scale, layer.shift, layer.gate)
    qkv, out, gate_up, down = (
        pack(layer.qkv, DIM // 2), pack(layer.out), pack(layer.gate_up, MLP), pack(layer.down),
    )  # fmt: skip
    rest = (layer.cos, layer.sin, HEADS, 1)

    def all_of(prefix: torch.Tensor | None, true: bool = False) -> list[torch.Tensor]:
        """q, k, v, hidden, and both residuals; true: of the reference in fp32."""
        s, h, g = (scale, shift, gate) if prefix is not None else (layer.scale, layer.shift, layer.gate)
        wide = (lambda t: t.float()) if true else (lambda t: t)
        x, k, v = wide(layer.x), wide(layer.k).clone(), wide(layer.v).clone()
        weights = [wide(w) for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if not true:
            weights = [qkv, out, gate_up, down]
        run = reference if true else cuda
        q = run.norm_qkv_rope(x, s, h, EPS, weights[0], *rest, k, v, layer.start, prefix)
        mixed = run.project_residual(wide(layer.y), weights[1], g, x, None, prefix)
        hidden = run.norm_glu(x, s, h, EPS, weights[2], prefix)
        ended = run.project_residual(wide(layer.h), weights[3], g, x, None, prefix)
        return [q, k[:, layer.start :], v[:, layer.start :], hidden, mixed, ended]

    plain = all_of(None)
    for first in (0, 1, tokens // 2, tokens):
        each = [(first + entry) % (tokens + 1) if first else 0 for entry in range(batch)]
        prefix = torch.tensor(each, dtype=torch.int32, device="cuda")[:, None]
        found = all_of(prefix)
        for ours, truth, usual in zip(found, all_of(prefix, true=True), plain, strict=True):
            assert error(ours, truth) < 6e-3
            if not any(each):
                assert torch.equal(ours, usual)
            for entry, length in enumerate(each):  # given or not, a row alone is right too
                for rows in (slice(0, length), slice(length, tokens)):
                    if rows.stop > rows.start:
                        assert error(ours[entry, rows], truth[entry, rows]) < 2e-2


@pytest.mark.parametrize("tokens", [10, 50])
def test_a_captured_chain_reads_each_length_of_a_prefix(tokens: int) -> None:
    """No capture between them; length 0 has the bits of a chain that knows of no prefix."""
    torch.use_deterministic_algorithms(False)
    solver = Solver(tokens)
    plain = solver.run()
    solver.give(0)
    assert torch.equal(solver.run(), plain)
    graph, result = solver.captured("")
    for length in (0, 1, 4, tokens - 1, tokens, 0):
        solver.give(length)
        expected = solver.run()
        assert torch.equal(expected[:, :length], solver.previous[:, :length])
        for _ in range(10):
            result.fill_(torch.nan)
            graph.replay()
            assert torch.equal(result, expected)
        assert length or torch.equal(result, plain)


def test_a_chain_with_a_prefix_and_late_stores_has_the_same_bits() -> None:
    torch.use_deterministic_algorithms(False)
    solver = Solver(10)
    solver.give(4)
    expected = solver.run()
    graph, result = solver.captured("all", DELAY=20)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        graph.replay()
        wrong += (result != expected).sum()
    assert int(wrong) == 0
