"""Golden actions, determinism, dtype and the errors that a robot would meet."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_policies import CHECKPOINTS, observe

import innerloop
from innerloop.contract import (
    CheckpointError,
    MemoryPlanError,
    NonFiniteError,
    ObservationError,
    PrecisionError,
    Role,
)
from innerloop.engine import LoadedPolicy
from innerloop.process import Edge


def test_same_seed_same_bits_other_seed_other_actions(policy: LoadedPolicy) -> None:
    observation = observe(policy, 0)
    one, two = (policy.infer(observation, seed=7).actions for _ in range(2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, policy.infer(observation, seed=8).actions)
    assert not np.array_equal(policy.infer(observation).actions, policy.infer(observation).actions)


def test_chunk_has_the_checkpoints_shape_and_a_receipt(policy: LoadedPolicy) -> None:
    chunk = policy.infer(observe(policy, 0), seed=0)
    assert chunk.actions.shape == (policy.config.chunk, policy.processor.widths.action)
    assert chunk.actions.dtype == np.float32
    assert chunk.normalized.shape == (policy.config.chunk, policy.config.max_action_dim)
    receipt = chunk.receipt
    assert receipt is not None
    assert receipt.fingerprint == policy.fingerprint
    assert (receipt.precision, receipt.device, receipt.kernels, receipt.seed) == ("fp32", "cpu", "reference", 0)
    assert receipt.bytes["weights"] >= sum(p.numel() for p in policy.model.parameters()) * 4
    assert receipt.bytes["state"] == sum(b.bytes for b in next(iter(policy.plans.values())).by_role(Role.STATE))
    assert json.dumps(policy.metadata)


def test_frame_size_layout_and_colour_do_not_change_the_meaning(policy: LoadedPolicy) -> None:
    small, large = (policy.infer(observe(policy, 0, size), seed=0) for size in ((48, 64), (240, 320)))
    assert small.actions.shape == large.actions.shape
    assert not np.array_equal(small.actions, large.actions)


def test_the_callers_arrays_are_never_modified(policy: LoadedPolicy) -> None:
    observation = observe(policy, 0)
    copies = {name: image.copy() for name, image in observation["images"].items()}
    state = observation["state"].copy()
    noise = np.ones((policy.config.chunk, policy.config.max_action_dim), np.float32)
    for array in (*observation["images"].values(), observation["state"], noise):
        array.setflags(write=False)
    policy.infer(observation, noise=noise)
    assert all(np.array_equal(observation["images"][n], c) for n, c in copies.items())
    assert np.array_equal(observation["state"], state)


@pytest.mark.parametrize("shape", [(1, 32), (50, 7), (2, 10, 32)])
def test_noise_of_the_wrong_shape(policy: LoadedPolicy, shape: tuple[int, ...]) -> None:
    if shape == (policy.config.chunk, policy.config.max_action_dim):
        pytest.skip("the right shape for this family")
    with pytest.raises(ObservationError, match=r"noise has shape.*chunk x max_action_dim"):
        policy.infer(observe(policy, 0), noise=np.zeros(shape, np.float32))


def test_bad_observations_name_the_thing(policy: LoadedPolicy) -> None:
    good, camera = observe(policy, 0), policy.config.cameras[0]
    image = good["images"][camera]
    rest = {name: i for name, i in good["images"].items() if name != camera}
    cases = [
        ({"images": rest}, camera),
        ({"images": {**good["images"], "gripper_cam": image}}, "gripper_cam"),
        ({"images": {**rest, "bsae": image}}, "bsae"),
        ({"images": {**rest, camera: image.astype(np.float32)}}, camera),
        ({"images": {**rest, camera: image.astype(np.int16)}}, "int16"),
        ({"images": {**rest, camera: image[..., 0]}}, camera),
        ({"images": {**rest, camera: np.zeros((0, 4, 3), np.uint8)}}, camera),
        ({"images": {**rest, camera: np.zeros((1081, 1921, 3), np.uint8)}}, "1920"),
        ({"state": np.zeros(33, np.float32)}, "33"),
        ({"state": np.full(policy.processor.widths.state, np.nan, np.float32)}, "NaN|finite"),
        ({"state": np.full(policy.processor.widths.state, np.inf, np.float32)}, "finite|inf"),
        ({"prompt": "push " * 300}, "token"),
        ({"prompt": 3}, "prompt"),
    ]
    for change, words in cases:
        with pytest.raises(ObservationError) as caught:
            policy.infer({**good, **change}, seed=0)
        assert re.search(words, str(caught.value)), (change.keys(), str(caught.value))


def test_output_that_is_not_finite_is_an_error(policy: LoadedPolicy) -> None:
    noise = np.full((policy.config.chunk, policy.config.max_action_dim), 3e38, np.float32)
    with pytest.raises(NonFiniteError):
        policy.infer(observe(policy, 0), noise=noise)
    assert np.isfinite(policy.infer(observe(policy, 0), seed=0).actions).all()


def test_precision_and_device_are_met_or_refused() -> None:
    path = CHECKPOINTS["pi05"]
    with pytest.raises(PrecisionError, match="bf16"):
        innerloop.load(path, precision="fp16")
    with pytest.raises(PrecisionError, match="int3"):
        innerloop.load(path, precision="int3")
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(PrecisionError, match="no CUDA device"):
            innerloop.load(path, device="cuda")


def test_bf16_stays_near_fp32(policy: LoadedPolicy) -> None:
    half = innerloop.load(CHECKPOINTS[policy.family.name], device="cpu", precision="bf16")
    observation = observe(policy, 0)
    a, b = policy.infer(observation, seed=1).normalized, half.infer(observation, seed=1).normalized
    cosine = float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert cosine >= 0.999
    assert half.fingerprint != policy.fingerprint
    half.close()


def test_memory_cap_refuses_before_allocation() -> None:
    with pytest.raises(MemoryPlanError, match="weights"):
        innerloop.load(CHECKPOINTS["pi05"], device="cpu", memory_cap=1000)


def test_horizon_that_contradicts_is_refused() -> None:
    with pytest.raises(CheckpointError, match="horizon=5"):
        innerloop.load(CHECKPOINTS["pi05"], device="cpu", horizon=5)


def test_rename_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "c")
    with pytest.raises((CheckpointError, ObservationError), match="nowhere"):
        innerloop.load(tmp_path / "c", device="cpu", edge=Edge(rename={"front": "nowhere"}))
    renamed = innerloop.load(tmp_path / "c", device="cpu", edge=Edge(rename={"front": "base"}))
    observation = observe(renamed, 0)
    images = {"front": observation["images"]["base"], "wrist": observation["images"]["wrist"]}
    plain = innerloop.load(CHECKPOINTS["pi05"], device="cpu")
    assert np.array_equal(
        renamed.infer({**observation, "images": images}, seed=0).actions, plain.infer(observation, seed=0).actions
    )
    renamed.close()
    plain.close()


def test_one_changed_weight_changes_fingerprint_and_actions(tmp_path: Path, policy: LoadedPolicy) -> None:
    from safetensors.torch import load_file, save_file

    source = CHECKPOINTS[policy.family.name]
    shutil.copytree(source, tmp_path / "c")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    name = next(n for n in tensors if n.endswith("action_out_proj.bias"))
    tensors[name] = tensors[name] + 1.0
    save_file(tensors, tmp_path / "c" / "model.safetensors")
    other = innerloop.load(tmp_path / "c", device="cpu")
    assert other.fingerprint != policy.fingerprint
    assert not np.array_equal(
        other.infer(observe(policy, 0), seed=0).actions, policy.infer(observe(policy, 0), seed=0).actions
    )
    other.close()


def test_on_a_cpu_nothing_claims_packed_kernels(policy: LoadedPolicy) -> None:
    assert not policy.packed
    assert policy.kernels == "reference"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kernels": "fast"}, "kernels 'fast' do not exist; there are reference, operators, fused"),
        ({"batch": 0}, "batch=0 decides for nobody"),
        ({"batch": -2}, "batch=-2 decides for nobody"),
    ],
)
def test_a_choice_that_is_none_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PrecisionError, match=words):
        innerloop.load(CHECKPOINTS["pi05"], device="cpu", **asked)


def test_arguments_of_another_kind_are_named(policy: LoadedPolicy) -> None:
    with pytest.raises(ObservationError, match="session is 3; it takes a name"):
        policy.infer(observe(policy, 0), session=3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"edge is a dict; it takes innerloop\.Edge"):
        innerloop.load(CHECKPOINTS["pi05"], device="cpu", edge={"state_dim": 8})  # type: ignore[arg-type]
