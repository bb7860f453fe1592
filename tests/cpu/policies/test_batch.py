"""Several robots in one decision: row i depends on input i alone."""

from collections.abc import Iterator

import numpy as np
import pytest
from loaded_policies import CHECKPOINTS, observe

import innerloop
from innerloop.contract import ObservationError, Previous
from innerloop.engine import LoadedPolicy


@pytest.fixture(scope="module")
def three(policy: LoadedPolicy) -> Iterator[LoadedPolicy]:
    loaded = innerloop.load(CHECKPOINTS[policy.family.name], device="cpu", batch=3)
    yield loaded
    loaded.close()


def decide(policy: LoadedPolicy, order: list[int]) -> list[np.ndarray]:
    """Observations and seeds of these numbers, in this order."""
    observations = [{**observe(policy, i, (48 + 8 * i, 64)), "prompt": "push " * (i + 1)} for i in order]
    nothing = [None] * len(order)
    chunks = policy.infer_batch(observations, noises=nothing, seeds=order, sessions=[f"r{i}" for i in order])
    return [chunk.normalized for chunk in chunks]


def test_batched_rows_equal_single_decisions(policy: LoadedPolicy, three: LoadedPolicy) -> None:
    together = decide(three, [0, 1, 2])
    for i, row in enumerate(together):
        alone = decide(policy, [i])[0]
        np.testing.assert_allclose(row, alone, atol=1e-4)


def test_swapping_rows_swaps_results(three: LoadedPolicy) -> None:
    """To the bit where a row keeps its place; in another place of a product's tile some processors round otherwise."""
    one, two = decide(three, [0, 1, 2]), decide(three, [2, 1, 0])
    assert np.array_equal(one[1], two[1])
    for a, b in zip(one, reversed(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not np.allclose(one[0], two[0], atol=1e-2)


def test_robots_of_a_batch_continue_chunks_of_their_own(policy: LoadedPolicy, three: LoadedPolicy) -> None:
    seen, sessions = [observe(policy, i) for i in range(3)], ["a", "b", "c"]
    left = policy.infer(seen[0], seed=9, session="a").actions[2:]
    previous = [Previous(left, 2), None, Previous(left[:3], 1, schedule="PREFIX")]
    nothing = [None] * 3
    together = three.infer_batch(seen, noises=nothing, seeds=[0, 1, 2], sessions=sessions, previous=previous)
    for i, chunk in enumerate(together):
        alone = policy.infer(seen[i], seed=i, session=sessions[i], previous=previous[i])
        np.testing.assert_allclose(chunk.normalized, alone.normalized, atol=1e-4)
        plain = policy.infer(seen[i], seed=i, session=sessions[i])
        assert np.array_equal(alone.normalized, plain.normalized) == (previous[i] is None)


def test_fewer_rows_than_the_batch_and_too_many(three: LoadedPolicy) -> None:
    np.testing.assert_allclose(decide(three, [1])[0], decide(three, [0, 1, 2])[1], atol=1e-5)
    assert three.infer(observe(three, 0), seed=0).actions.shape == (three.config.chunk, three.processor.widths.action)
    with pytest.raises(ObservationError, match="4 observations.*batch=3"):
        decide(three, [0, 1, 2, 0])


def test_a_robot_alone_costs_what_it_costs_without_a_batch(policy: LoadedPolicy, three: LoadedPolicy) -> None:
    observation = observe(policy, 4)
    alone, plain = three.infer(observation, seed=4, session="alone"), policy.infer(observation, seed=4, session="alone")
    assert np.array_equal(alone.actions, plain.actions)
    again = three.infer_batch([observation], noises=[None], seeds=[5], sessions=["alone"])[0]
    assert again.receipt is not None
    assert again.receipt.stages == ("action",)  # its own session: only what changed
    assert three.memory.total > policy.memory.total
    assert three.memory.by_role()["weights"] == policy.memory.by_role()["weights"]
