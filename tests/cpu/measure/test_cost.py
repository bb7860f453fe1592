"""Flops and bytes counted by hand."""

import numpy as np
import torch
from toy_policy import HIDDEN, toy_plan

from innerloop.measure.cost import CostRecorder, stage_costs


def test_a_product_counts_weights_at_every_use_and_its_own_results_never() -> None:
    weight = torch.randn(64, 32, dtype=torch.bfloat16)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    target = torch.zeros(8, 64)
    with torch.no_grad(), CostRecorder() as recorder:
        for _ in range(3):
            y = torch.nn.functional.linear(x, weight)
        target.copy_(torch.relu(y))
    cost = recorder.cost
    assert cost.flops == 3 * 2 * 8 * 32 * 64
    assert cost.bytes == 3 * (64 * 32 + 8 * 32) * 2 + 8 * 64 * 4
    assert cost.unique_bytes == (64 * 32 + 8 * 32) * 2 + 8 * 64 * 4


def test_a_gather_moves_its_rows_and_an_expanded_tensor_its_elements() -> None:
    table, row = torch.randn(1000, 16), torch.randn(16)
    tokens = torch.tensor([3, 4])
    with torch.no_grad(), CostRecorder() as recorder:
        torch.nn.functional.embedding(tokens, table)
        row.expand(50, 16) + 1
    assert recorder.cost.bytes == 2 * 16 * 4 + 2 * 8 + 16 * 4


def test_meta_tensors_count_the_same() -> None:
    def attend(device: str) -> int:
        q, k, v = (torch.zeros(1, 2, 4, 16, device=device) for _ in range(3))
        with torch.no_grad(), CostRecorder() as recorder:
            torch.softmax(q @ k.mT, -1) @ v
        assert recorder.cost.bytes == 3 * q.nbytes
        return recorder.cost.flops

    assert attend("cpu") == attend("meta") == 2 * 2 * 2 * 4 * 4 * 16


def test_grouped_attention_counts_every_query_head() -> None:
    q, k = torch.randn(1, 8, 5, 16), torch.randn(1, 1, 7, 16)
    with torch.no_grad(), CostRecorder() as recorder:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert recorder.cost.flops == 2 * 8 * 5 * 7 * (16 + 16)


def test_stages_of_a_plan() -> None:
    inputs = {"frames": np.zeros((1, 2, 3072), np.uint8)}
    costs = stage_costs(toy_plan({}), inputs, torch.device("cpu"))
    assert list(costs) == ["vision", "context", "action"]
    square = HIDDEN * HIDDEN * 4
    assert all(cost.flops == 2 * HIDDEN**3 for cost in costs.values())
    assert costs["context"].bytes == 3 * square + 8 * 4  # image tokens and weight in, K/V out, tokens
