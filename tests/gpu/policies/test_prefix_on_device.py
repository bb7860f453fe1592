"""A trained prefix through captured stages on a GPU: the tiny checkpoints against the CPU, the published sizes by its rules."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from loaded_policies import CHECKPOINTS, observe

import innerloop
from innerloop import Previous
from innerloop.engine import LoadedPolicy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SETTINGS = [("fp32", "fused", 1e-3), ("fp32", "operators", 1e-3), ("bf16", "fused", 0.15), ("bf16", "operators", 0.15)]


def given(policy: LoadedPolicy, delay: int, rows: int = 8) -> Previous:
    """Made-up actions of a robot."""
    actions = np.random.default_rng(delay).uniform(-1, 1, (rows, policy.processor.widths.action))
    return Previous(actions.astype(np.float32), delay, schedule="PREFIX")


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def there(request: pytest.FixtureRequest) -> Iterator[LoadedPolicy]:
    loaded = innerloop.load(CHECKPOINTS[request.param], device="cpu")
    yield loaded
    loaded.close()


@pytest.mark.parametrize(("precision", "kernels", "tolerance"), SETTINGS)
def test_as_on_the_cpu(there: LoadedPolicy, precision: str, kernels: str, tolerance: float) -> None:
    path = CHECKPOINTS[there.family.name]
    here = innerloop.load(path, device="cuda", precision=precision, kernels=kernels, batch=3)  # type: ignore[arg-type]
    observation, captured = observe(there, 0), here.runtime.captures
    plain = here.infer(observation, seed=1).normalized
    for delay in (0, 1, 4, 7):
        previous = given(here, delay)
        found = here.infer(observation, seed=1, previous=previous)
        expected = there.infer(observation, seed=1, previous=previous)
        np.testing.assert_allclose(found.normalized, expected.normalized, atol=tolerance, rtol=0)
        np.testing.assert_allclose(found.actions[:delay], previous.actions[:delay], atol=1e-5)
        assert (found.normalized.tobytes() == plain.tobytes()) == (delay == 0)
    assert here.runtime.captures == captured
    robots, seeds = [given(here, 5), None, given(here, 2, rows=1)], [1, 2, 3]
    observations = [observe(there, i) for i in range(3)]
    chunks = here.infer_batch(observations, noises=[None] * 3, seeds=seeds, sessions=["a", "b", "c"], previous=robots)
    for one, seed, seen, chunk in zip(robots, seeds, observations, chunks, strict=True):
        expected = there.infer(seen, seed=seed, previous=one)
        np.testing.assert_allclose(chunk.normalized, expected.normalized, atol=tolerance, rtol=0)
    here.close()


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize("chunk", [10, 50])
def test_published_size_with_random_weights(family: str, chunk: int) -> None:
    """The few-row kernels beside the plain-torch ones over the same weights; no capture for another length."""
    policies = [
        innerloop.random_policy(family, cameras=2, chunk=chunk, device="cuda", kernels=kernels)
        for kernels in ("fused", "reference")
    ]
    packed = policies[0]
    observation, captured = observe(packed, 0, (480, 640)), packed.runtime.captures
    plain = packed.infer(observation, seed=1).normalized
    for delay in (0, 1, 6, chunk - 1):
        previous = given(packed, delay, rows=chunk)
        found, truth = (policy.infer(observation, seed=1, previous=previous).normalized for policy in policies)
        np.testing.assert_allclose(found[:delay], truth[:delay], atol=1e-6)
        free = [rows[delay:].astype(np.float64).ravel() for rows in (found, truth)]
        assert free[0] @ free[1] / np.linalg.norm(free[0]) / np.linalg.norm(free[1]) > 0.999
        assert (found.tobytes() == plain.tobytes()) == (delay == 0)
    assert packed.runtime.captures == captured
    for policy in policies:
        policy.close()
