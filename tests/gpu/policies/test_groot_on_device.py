"""Captured GR00T policies on a GPU, against the same goldens as on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

import innerloop
from recipes.tiny import groot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GOLDEN = np.load("tests/golden/groot.npz")
FLOAT32, BFLOAT16 = 1e-3, 0.15  # normalised actions; sums on the device are ordered otherwise


@pytest.mark.parametrize("name", sorted(groot.CASES))
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FLOAT32), ("bf16", BFLOAT16)])
def test_captured_actions(tmp_path: Path, name: str, precision: str, tolerance: float) -> None:
    case = groot.CASES[name]
    directory = groot.write(tmp_path, **case.settings)
    policy = innerloop.load(directory, device="cuda", precision=precision, assets=case.robot)
    observation, noise = groot.observation(case), groot.noise(case)
    theirs = GOLDEN[f"{name}.normalized"]
    first = policy.infer(observation, noise=noise).normalized
    np.testing.assert_allclose(first[:, : theirs.shape[1]], theirs, atol=tolerance, rtol=0)
    policy.infer({**observation, "prompt": "another"}, noise=noise + 1)
    again = policy.infer(observation, noise=noise).normalized
    np.testing.assert_array_equal(first, again)
    policy.close()


def test_published_size_with_random_weights() -> None:
    """Captured without a copy to the host, and equal to its interpreter: both are checked while it gets ready."""
    policy = innerloop.random_policy("groot", cameras=2, chunk=40, steps=4, device="cuda")
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (480, 640, 3), dtype=np.uint8) for name in policy.config.cameras}
    observation = {"images": images, "state": np.zeros(132, np.float32), "prompt": "pick up the red block"}
    chunk = policy.infer(observation, seed=0)
    assert chunk.actions.shape == (40, 132)
    assert np.isfinite(chunk.normalized).all()
    policy.close()
