"""What is laid out for the few-row kernels, and what a batch keeps in both layouts."""

import pytest
import torch

from innerloop.blocks.expert import ActionExpert
from innerloop.engine import Placement, assembly
from innerloop.kernels import skinny
from innerloop.kernels.skinny.packing import Packed
from innerloop.policies import FAMILIES


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few-row kernels as if this were a GPU that has them."""
    monkeypatch.setattr(skinny, "supported", lambda device, dtype, rows: 1 <= rows <= 64)


@pytest.mark.parametrize(("batch", "twice"), [(1, False), (6, False), (7, True)])
def test_a_batch_of_too_many_rows_keeps_dense_weights_and_the_plan_counts_them(
    batch: int, twice: bool, anywhere: None
) -> None:
    config = FAMILIES["pi05"].default(1, 10, 2)  # chunk 10
    with torch.device("meta"):
        model = FAMILIES["pi05"].model(config)
    place = Placement(torch.device("cpu"), "bf16", batch)
    copies = assembly._copies(model, place, config)
    dtypes = dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16)
    once, all_of = assembly.memory_plan(model, dtypes), assembly.memory_plan(model, dtypes, copies=copies)
    expert = next(module for module in model.modules() if isinstance(module, ActionExpert))
    size = 2 * sum(parameter.numel() for parameter in expert.parameters())
    assert all_of.total - once.total == (size if twice else 0)
    assert len(copies) == (4 * 18 if twice else 0)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize(("chunk", "packed"), [(10, True), (32, True), (33, False), (50, False), (64, False)])
def test_one_robot_of_more_than_32_rows_keeps_dense_weights_alone(
    family: str, chunk: int, packed: bool, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family].default(1, chunk, 2)
    with torch.device("meta"):
        model = FAMILIES[family].model(config)
    monkeypatch.setattr(skinny, "pack", lambda weight, pair, keep: Packed(weight, *weight.shape, pair))
    for batch in (1, 2):
        place = Placement(torch.device("cpu"), "bf16", batch)
        assert packed or not assembly._copies(model, place, config)
    assert assembly._pack(model, Placement(torch.device("cpu"), "bf16", 1), config) == packed


def test_what_is_counted_twice_is_what_is_packed(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES["pi05"].default(1, 10, 2)
    with torch.device("meta"):
        model = FAMILIES["pi05"].model(config)
    copies = assembly._copies(model, Placement(torch.device("cpu"), "bf16", 7), config)
    kept: list[bool] = []

    def pack(weight: torch.Tensor, pair: int = 8, keep: bool = False) -> Packed:
        kept.append(keep)
        return Packed(weight, *weight.shape, pair)

    monkeypatch.setattr(skinny, "pack", pack)
    assert assembly._pack(model, Placement(torch.device("cpu"), "bf16", 7), config)
    assert kept == [True] * len(copies)
    left = {name for name, _ in model.named_parameters()}
    assert not left & set(copies)
