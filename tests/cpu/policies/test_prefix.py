"""A trained prefix as an input of the captured action stage (arXiv:2512.05964), against sampling written out."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow_prefix
import torch
from loaded_policies import CHECKPOINTS, observe

import innerloop
from innerloop import Previous
from innerloop.contract import CheckpointError, ObservationError
from innerloop.engine import LoadedPolicy
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter
from scripts import make_prefix_golden

CHUNK = 16
Opened = Callable[..., LoadedPolicy]


def checkpoint(directory: Path, family: str, **changes: Any) -> Path:
    """A tiny checkpoint whose chunk is long enough for a delay of 12."""
    shutil.copytree(CHECKPOINTS[family], directory, dirs_exist_ok=True)
    path = directory / "config.json"
    path.chmod(0o644)
    changes = {"chunk_size": CHUNK, "n_action_steps": CHUNK, **changes}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.fixture(scope="module", params=sorted(CHECKPOINTS))
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedPolicy]:
    directory = checkpoint(tmp_path_factory.mktemp("long"), request.param)
    loaded = innerloop.load(directory, device="cpu", batch=3)
    yield loaded
    loaded.close()


def previous(policy: LoadedPolicy, delay: int, rows: int = CHUNK, **more: Any) -> Previous:
    """Made-up actions of a robot."""
    rng = np.random.default_rng(100 + delay)
    actions = rng.uniform(-1, 1, (rows, policy.processor.widths.action)).astype(np.float32)
    return Previous(actions, delay, **{"schedule": "PREFIX", **more})


def buffers(policy: LoadedPolicy, observation: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a plain decision leaves behind."""
    plans = list(policy.plans.values())
    interpreter = Interpreter(plans, Arena(plans))
    inputs = policy.processor.prepare(observation).inputs
    for name, value in {**inputs, "noise": policy.processor.noise(seed=0)}.items():
        interpreter.write(name, value)
    interpreter.run(plans[-1])
    return {name: interpreter.read(name) for name in plans[-1].buffers}


def slowly(policy: LoadedPolicy, observation: dict[str, Any], seed: int, given: Previous) -> np.ndarray:
    """The same decision written out, normalised."""
    context = policy.processor.prepare(observation).context
    target = torch.from_numpy(policy.processor.guidance(given, context)["previous"])
    horizon = len(given.actions) if given.horizon is None else given.horizon
    length = min(given.delay, len(given.actions), horizon)
    noise = torch.from_numpy(policy.processor.noise(seed=seed))
    found = slow_prefix.sample(policy.model, buffers(policy, observation), 0, noise, target, length)
    return found.float().numpy()


@pytest.mark.parametrize("delay", range(13))
def test_delays(long: LoadedPolicy, delay: int) -> None:
    observation, given = observe(long, delay), previous(long, delay)
    ours = long.infer(observation, seed=delay, previous=given)
    np.testing.assert_allclose(ours.normalized, slowly(long, observation, delay, given), atol=1e-5)
    np.testing.assert_allclose(ours.actions[:delay], given.actions[:delay], atol=1e-5)
    plain = long.infer(observation, seed=delay)
    assert (np.abs(plain.normalized[delay:] - ours.normalized[delay:]).max() > 1e-3) == (delay > 0)


def test_lerobots_numbers(tmp_path: Path) -> None:
    """Of its pi0.5 in mode "trained", which came after 0.6.1."""
    policy = innerloop.load(make_prefix_golden.checkpoint(tmp_path), device="cpu")
    observation, noise, left = make_prefix_golden.case()
    padded = np.pad(left, ((0, 0), (0, noise.shape[1] - left.shape[1])))
    actions = policy.processor.finish(padded, policy.processor.prepare(observation).context)
    for delay, theirs in enumerate(np.load(make_prefix_golden.GOLDEN)["normalized"]):
        ours = policy.infer(observation, noise=noise, previous=Previous(actions, delay, schedule="PREFIX"))
        np.testing.assert_allclose(ours.normalized[:, : left.shape[1]], theirs, atol=1e-5)
    policy.close()


@pytest.mark.parametrize(("rows", "more"), [(0, {}), (1, {}), (4, {}), (9, {}), (9, {"horizon": 2})])
def test_shorter_previous_chunks(long: LoadedPolicy, rows: int, more: dict[str, Any]) -> None:
    observation, given = observe(long, 1), previous(long, 6, rows, **more)
    ours = long.infer(observation, seed=2, previous=given).normalized
    np.testing.assert_allclose(ours, slowly(long, observation, 2, given), atol=1e-5)


def test_no_delay_is_the_plain_call_bit_for_bit(long: LoadedPolicy) -> None:
    observation = observe(long, 3)
    plain = long.infer(observation, seed=4).actions
    for given in (previous(long, 0), previous(long, 5, rows=0), previous(long, 5, horizon=0)):
        assert long.infer(observation, seed=4, previous=given).actions.tobytes() == plain.tobytes()
    long.infer(observation, seed=4, previous=previous(long, 7))
    assert long.infer(observation, seed=4).actions.tobytes() == plain.tobytes()


def test_every_length_runs_the_same_captured_stages(long: LoadedPolicy) -> None:
    observation, captured = observe(long, 5), long.runtime.captures
    long.infer(observation, seed=1)
    for delay in range(CHUNK):
        receipt = long.infer(observation, seed=2, previous=previous(long, delay)).receipt
        assert receipt is not None
        assert receipt.stages == ("action",)
    assert long.runtime.captures == captured


def test_each_robot_of_a_batch_has_its_own_prefix(long: LoadedPolicy) -> None:
    observations = [observe(long, i) for i in range(3)]
    given = [previous(long, 7), None, previous(long, 2, rows=5)]
    chunks = long.infer_batch(
        observations, noises=[None] * 3, seeds=[5, 6, 7], sessions=["a", "b", "c"], previous=given
    )
    for i, chunk in enumerate(chunks):
        slow = slowly(long, observations[i], 5 + i, given[i] or previous(long, 0))
        np.testing.assert_allclose(chunk.normalized, slow, atol=1e-5)


def test_guidance_and_prefix_of_two_robots_do_not_mix(long: LoadedPolicy) -> None:
    observations = [observe(long, i) for i in range(2)]
    given = [previous(long, 4, schedule="LINEAR"), previous(long, 4)]
    chunks = long.infer_batch(observations, noises=[None] * 2, seeds=[1, 2], sessions=["a", "b"], previous=given)
    for i, chunk in enumerate(chunks):
        alone = long.infer(observations[i], seed=1 + i, previous=given[i]).normalized
        np.testing.assert_allclose(chunk.normalized, alone, atol=1e-5)


def test_what_training_gave_bounds_the_delay(tmp_path: Path) -> None:
    """LeRobot after 0.6.1 states it; where a checkpoint does not, nobody can tell."""
    for stated, delay, words in ((6, 7, "delay of 7 steps.*at most 6.*LINEAR, or lower"), (0, 1, "at most 0.*LINEAR$")):
        directory = checkpoint(tmp_path / str(stated), "pi05", rtc_training_max_delay=stated)
        policy = innerloop.load(directory, device="cpu")
        assert policy.metadata["processing"]["action"]["trained_delay"] == stated
        with pytest.raises(ObservationError, match=words):
            policy.infer(observe(policy, 0), previous=previous(policy, delay))
        policy.infer(observe(policy, 0), previous=previous(policy, delay, schedule="LINEAR"))
        policy.infer(observe(policy, 0), previous=previous(policy, delay, rows=stated))
        policy.close()
    with pytest.raises(CheckpointError, match="rtc_training_max_delay is 'six'"):
        innerloop.load(checkpoint(tmp_path / "six", "pi05", rtc_training_max_delay="six"), device="cpu")
