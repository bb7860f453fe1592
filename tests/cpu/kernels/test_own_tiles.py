"""The action expert over dense weights in a chain: its kernels interpreted, and the same meaning in plain torch."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.case import earned
from innerloop.blocks.expert import ActionExpert, Cache, Modulation
from innerloop.blocks.sizes import DecoderSizes
from innerloop.kernels import launch
from innerloop.kernels.launch import Launch

BF16 = torch.bfloat16
SIZES = DecoderSizes(width=64, depth=2, mlp_dim=96, heads=4, kv_heads=1, head_dim=32)
START = 21


def _expert(dtype: torch.dtype) -> ActionExpert:
    torch.manual_seed(0)
    expert = ActionExpert(SIZES).requires_grad_(False)
    for parameter in expert.parameters():
        parameter.data = (torch.randn(parameter.shape) * parameter.shape[1] ** -0.5).to(BF16).to(dtype)
    return expert


def _run(rows: int, dtype: torch.dtype, plain: bool, prefix: torch.Tensor | None, own: bool) -> list[torch.Tensor]:
    """The expert's result and the cache rows that it wrote. plain: norms without shift and gate, as pi0's."""
    expert = _expert(dtype)
    torch.manual_seed(rows)
    x = torch.randn(1, rows, SIZES.width).to(BF16).to(dtype)
    table = torch.randn(2, 2 * SIZES.depth, 3, SIZES.width) * 0.3
    norms = [Modulation(*(norm if prefix is not None else norm[0]).unbind(-2)) for norm in table.unbind(1)]
    if prefix is None:
        norms = [Modulation(*norm.unbind(0)) for norm in table[0]]
    if plain:
        norms = [Modulation(norm[0]) for norm in table[0]]
    keys, values = (torch.randn(SIZES.depth, 1, START + rows, 1, SIZES.head_dim).to(BF16).to(dtype) for _ in range(2))
    valid = torch.ones(1, START + rows, dtype=torch.int32)
    valid[:, 5:9] = 0
    angle = torch.randn(1, rows, SIZES.head_dim // 2)
    call = expert._own_tiles if own else expert.forward
    out = call(x, norms, Cache(keys, values, valid), (angle.cos(), angle.sin()), START, prefix)
    return [out, keys[:, :, START:].clone(), values[:, :, START:].clone()]


@pytest.mark.parametrize("rows", [1, 33, 50])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("given", [None, 0, 7])
def test_dense_means_what_packed_means(rows: int, plain: bool, given: int | None) -> None:
    """In plain torch and fp32 the two orders of the same operations agree."""
    prefix = None if given is None or plain else torch.tensor([[given]], dtype=torch.int32)
    for one, other in zip(*(_run(rows, torch.float32, plain, prefix, own) for own in (True, False)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("rows", "plain", "given"), [(33, False, None), (50, False, 7), (51, True, None), (64, False, 0)]
)
def test_the_chain_s_kernels(rows: int, plain: bool, given: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, interpreted, on tiles such as a device takes; what they forget to write is NaN."""
    prefix = None if given is None else torch.tensor([[given]], dtype=torch.int32)
    same, truth = (_run(rows, dtype, plain, prefix, False) for dtype in (BF16, torch.float32))
    usual = torch.empty

    def poisoned(*args: object, **named: object) -> torch.Tensor:
        tensor: torch.Tensor = usual(*args, **named)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for name in ("linear", "norm", "attention", "rope", "activation"):
        monkeypatch.setattr(f"innerloop.kernels.{name}.chosen", _twin)
    monkeypatch.setattr("innerloop.kernels.linear.fused", lambda x: True)
    monkeypatch.setattr(torch, "empty", poisoned)
    pair, share = (
        {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 32},
        {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "BULK": 1},
    )
    forced: dict[launch.Key, Launch] = {
        ("linear.gated", (rows, 96, 1 << 30, 64, 2)): Launch.of(4, 2, **pair),
        ("linear.rotated", (rows, 96, 16, 64, 2)): Launch.of(4, 2, **pair),
        ("attention.ahead", (4 * rows, 1, START + rows, 32, 2)): Launch.of(4, 1, BLOCK_M=32, BLOCK_N=16),
        ("attention.combine", (4 * rows, 32)): Launch.of(4, BLOCK_R=32),
        ("linear.chained_shares", (rows, 64, 128, 2)): Launch.of(4, 2, SPLIT=4, **share),
        ("linear.chained_shares", (rows, 64, 96, 2)): Launch.of(4, 2, SPLIT=3, **share),
    }
    with launch.forced(forced), launch.recorded() as used:
        ours = _run(rows, BF16, plain, prefix, own=False)
    assert set(forced) <= set(used)
    assert "norm" in {op for op, _ in used}
    assert not {"linear.chained", "rope", "activation"} & {op for op, _ in used}
    for name, *three in zip(("out", "keys", "values"), ours, same, truth, strict=True):
        earned(name, *three, 2.0**-5)


def _twin(reference: object, x: torch.Tensor) -> object:
    from innerloop.kernels.select import _twin as found

    return found(reference)  # type: ignore[type-var]
