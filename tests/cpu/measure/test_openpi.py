"""openpi beside ours, with a stand-in that has its signatures: weights by name, noise and inputs arrive as it wants them."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import innerloop
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels.image import frames_to_patches
from innerloop.measure.against.openpi import OpenpiPolicy
from innerloop.measure.options import BenchOptions
from innerloop.measure.side_by_side import Bench

ROOT = Path(__file__).parents[3]
CHECKPOINTS = {"pi05": ROOT / "examples/checkpoints/tiny-pi05", "pi0": ROOT / "tests/golden/tiny-pi0"}


@pytest.fixture
def openpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's model class, with the stand-in importable."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_openpi"))
    yield import_module("openpi.models_pytorch.pi0_pytorch").PI0Pytorch
    for name in [name for name in sys.modules if name.partition(".")[0] == "openpi"]:
        del sys.modules[name]


@pytest.fixture(params=sorted(CHECKPOINTS))
def policy(request: pytest.FixtureRequest) -> Iterator[LoadedPolicy]:
    loaded = innerloop.load(CHECKPOINTS[request.param], device="cpu", kernels="reference")
    yield loaded
    loaded.close()


@pytest.fixture
def stored(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under openpi's names: LeRobot's without the leading `model.`."""
    tensors = load_file(CHECKPOINTS[policy.family.name] / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.fixture
def other(openpi: Any, policy: LoadedPolicy, stored: dict[str, torch.Tensor]) -> OpenpiPolicy:
    openpi.shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    return OpenpiPolicy(policy)


def observe(policy: LoadedPolicy, size: tuple[int, int]) -> dict[str, Any]:
    """The last camera is absent where there is more than one."""
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for name in policy.cameras}
    if len(images) > 1:
        images[policy.cameras[-1]] = None
    state = rng.uniform(-1, 1, policy.processor.widths.state).astype(np.float32)
    return {"images": images, "state": state, "prompt": "pick up the red block"}


def test_weights_are_the_checkpoints_by_name(other: OpenpiPolicy, stored: dict[str, torch.Tensor]) -> None:
    given = {name: value for name, value in other._model.named_parameters() if not value.isnan().any()}
    assert all(torch.equal(value, stored[name]) for name, value in given.items())
    left = set(stored) - set(given)
    assert all("lm_head" in name or "language_model.norm" in name or "language_model.layers.1" in name for name in left)


def test_the_same_memory_serves_both(other: OpenpiPolicy, policy: LoadedPolicy) -> None:
    ours = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}
    theirs = {value.untyped_storage().data_ptr() for value in other._model.parameters() if not value.isnan().any()}
    assert theirs <= ours


@pytest.mark.parametrize("size", [(48, 64), (56, 56)])
def test_inputs_arrive(other: OpenpiPolicy, policy: LoadedPolicy, size: tuple[int, int]) -> None:
    observation, config = observe(policy, size), policy.config
    noise = np.random.default_rng(1).standard_normal((config.chunk, config.max_action_dim)).astype(np.float32)
    actions = other.infer(observation, noise)
    device, given, start, steps = other._model.given
    assert (device, steps) == (torch.device("cpu"), config.steps)
    np.testing.assert_array_equal(start[0], noise)
    np.testing.assert_allclose(actions, noise + other._model.action_out_proj.bias.numpy(force=True), atol=1e-6)
    prepared = policy.processor.prepare(observation)
    np.testing.assert_array_equal(given.tokenized_prompt[0], prepared.inputs["tokens"])
    assert int(given.tokenized_prompt_mask.sum()) == prepared.inputs["prompt_length"][0]
    state = prepared.context.normalized_state
    np.testing.assert_array_equal(given.state[0, : len(state)], state)
    assert not given.state[0, len(state) :].any()
    names = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    present = [bool(given.image_masks[name]) for name in names]
    assert present == [*prepared.inputs["camera_mask"].astype(bool), *[False] * (3 - len(config.cameras))]
    for place in np.flatnonzero(present):
        expected = picture(observation["images"][policy.cameras[place]], config.vision.image_size)
        torch.testing.assert_close(given.images[names[place]][0], expected, atol=1e-6, rtol=0)


def picture(frame: np.ndarray, size: int) -> torch.Tensor:
    """float32 [size, size, 3]: the frame as our vision stage sees it."""
    sizes = torch.tensor([[frame.shape[:2]]], dtype=torch.int32)
    one = frames_to_patches(torch.from_numpy(frame).reshape(1, 1, -1), sizes, size, size, torch.float32)
    return one.view(3, size, size).permute(1, 2, 0)


def test_built_as_configured_and_the_process_keeps_its_precision(other: OpenpiPolicy, policy: LoadedPolicy) -> None:
    config = other._model.config
    assert (config.dtype, config.pi05) == ("float32", policy.family.name == "pi05")
    assert config.action_horizon == policy.config.chunk
    assert config.max_token_len == policy.config.prompt_capacity
    assert torch.get_float32_matmul_precision() == "highest"


def test_other_sizes_are_refused(openpi: Any, policy: LoadedPolicy, stored: dict[str, torch.Tensor]) -> None:
    openpi.shapes = {name: (*tensor.shape[:-1], 3) for name, tensor in stored.items()}
    with pytest.raises(InnerloopError, match="published sizes"):
        OpenpiPolicy(policy)
    openpi.shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()} | {"new.weight": (1,)}
    with pytest.raises(InnerloopError, match=r"a checkpoint has no 'new\.weight'"):
        OpenpiPolicy(policy)


def test_an_unpatched_transformers_and_no_openpi_at_all_come_with_the_remedy(openpi: Any, policy: LoadedPolicy) -> None:
    openpi.complaint = "transformers_replace is not installed correctly"
    with pytest.raises(
        InnerloopError, match=r"(?s)not installed correctly.*uv sync, then copy its transformers_replace"
    ):
        OpenpiPolicy(policy)
    assert torch.get_float32_matmul_precision() == "highest"


def test_without_openpi() -> None:
    made = Bench(BenchOptions(str(CHECKPOINTS["pi0"]), device="cpu", against=("openpi",)))
    with (
        pytest.raises(InnerloopError, match=r"(?s)openpi\.models_pytorch.*clone https://github\.com/Physical"),
        made.references(),
    ):
        pass
