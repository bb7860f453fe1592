"""GR00T N1.7 against LeRobot 0.6.1, stage by stage: robots, image shapes and counts, prompt lengths, settings, no files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import innerloop
from innerloop.contract import CheckpointError, ObservationError, Previous
from innerloop.engine import NO_FILES, assemble, place
from innerloop.measure.against.groot import LeRobotGroot
from innerloop.measure.against.lerobot import require
from innerloop.measure.parity import compare
from innerloop.policies import FAMILIES
from recipes.tiny import groot, qwen

torch.set_num_threads(1)

SETTINGS = {
    "area": {},
    "bicubic": {"use_albumentations": False},
    "letterbox": {"letter_box_transform": True, "use_percentiles": False},
    "sizes by default": {"crop_fraction": None, "shortest_image_edge": None, "formalize_language": False},
    "bicubic letterbox": {"use_albumentations": False, "letter_box_transform": True, "crop_fraction": None},
}
PROMPTS = ("Pick up the red block.", "", "use the other hand, " * 6)


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """A function (robot, settings, chunk=8, steps=4) -> (our policy, LeRobot's); each is made once."""
    made = {}

    def make(robot, settings="area", **sizes):
        key = (robot, settings, *sorted(sizes.items()))
        if key not in made:
            directory = groot.write(tmp_path_factory.mktemp("groot"), **sizes, **SETTINGS[settings])
            policy = innerloop.load(directory, device="cpu", precision="fp32", assets=robot)
            made[key] = policy, LeRobotGroot(directory, robot)
        return made[key]

    yield make
    for policy, _ in made.values():
        policy.close()


def observe(policy, seed, sizes=((48, 64),), prompt=PROMPTS[0], reach=0.8):
    generator = np.random.default_rng(seed)
    images = {name: qwen.picture(seed + i, *sizes[i % len(sizes)]) for i, name in enumerate(policy.config.cameras)}
    state = reach * generator.standard_normal(policy.processor.widths.state).astype(np.float32)
    return {"images": images, "state": state, "prompt": prompt}


def check(policy, official, observation, seed=0):
    """Integers and bytes of pictures equal, everything else within 1e-4."""
    noise = np.random.default_rng(seed).standard_normal((policy.config.chunk, groot.ACTION)).astype(np.float32)
    report = compare(policy, official, observation, noise)
    assert report.passed, report.text()
    for name in ("tokens", "grids", "position_ids"):
        assert report.stage(name).max_abs == 0, report.text()
    assert report.stage("pixels").max_abs <= 1e-6, report.text()
    assert report.stage("normalized").max_abs <= 1e-4, report.text()
    return report


@pytest.mark.parametrize("robot", [groot.LIBERO, groot.DROID])
@pytest.mark.parametrize("sizes", [((48, 64),), ((24, 24),), ((85, 50),)])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "none", "long"])
def test_robots_images_and_prompts(loaded, robot, sizes, prompt):
    policy, official = loaded(robot)
    report = check(policy, official, observe(policy, 1, sizes, prompt, reach=2.0))
    assert {"features", "refined", "state_token", "velocity.3", "actions"} <= {s.stage for s in report.stages}


@pytest.mark.parametrize("robot", [groot.LIBERO, groot.DROID])
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_settings_of_the_processor(loaded, robot, settings):
    policy, official = loaded(robot, settings)
    check(policy, official, observe(policy, 2, ((60, 44),), "Push it: Now!", reach=1.5))


@pytest.mark.parametrize(("chunk", "steps"), [(5, 1), (16, 3), (8, 10)])
def test_chunks_and_steps(loaded, chunk, steps):
    policy, official = loaded(groot.LIBERO, chunk=chunk, steps=steps)
    check(policy, official, observe(policy, 5))


def test_an_absent_camera_has_no_picture(loaded):
    policy, official = loaded(groot.LIBERO)
    observation = observe(policy, 6)
    observation["images"]["wrist_image"] = None
    check(policy, official, observation)
    assert len(policy.processor.prepare(observation).inputs["frames"][1]) == 1  # an empty slot


def test_views_of_different_shapes(loaded):
    """LeRobot cannot stack them; each picture must be what it is beside one of its own shape."""
    policy, official = loaded(groot.LIBERO)
    mixed = policy.processor.prepare(observe(policy, 3, ((20, 35), (90, 60)))).inputs
    for view, size in enumerate(((20, 35), (90, 60))):
        alone = observe(policy, 3, (size,))
        check(policy, official, alone)
        inputs = policy.processor.prepare(alone).inputs
        assert all(np.array_equal(mixed[name][view], inputs[name][view]) for name in ("frames", "resizes"))


def test_a_history_of_frames(loaded):
    policy, official = loaded(groot.DROID)
    observation = observe(policy, 7)
    observation["images"] = {
        name: np.stack([qwen.picture(i, 40, 40), frame[:40, :40]])
        for i, (name, frame) in enumerate(observation["images"].items())
    }
    check(policy, official, observation)
    observation["images"] = {name: np.stack([frame[0]] * 3) for name, frame in observation["images"].items()}
    with pytest.raises(ObservationError, match="3 time steps.*takes 2"):
        policy.infer(observation, seed=0)


@pytest.mark.parametrize(("rows", "delay"), [(4, 2), (8, 0), (6, 6), (1, 1)])
def test_continuing_a_chunk(loaded, rows, delay):
    """GR00T's own rule: rows that will be executed meanwhile stay, those after it move less than free ones."""
    policy, official = loaded(groot.LIBERO)
    observation = observe(policy, 12)
    noise, other = (np.random.default_rng(n).standard_normal((8, groot.ACTION)).astype(np.float32) for n in (0, 1))
    before = policy.infer(observation, noise=other)
    left = np.clip(before.normalized[:rows, :7], -1, 1)  # as much of it as reaches the robot
    context = policy.processor.prepare(observation).context
    padded = np.zeros((8, groot.ACTION), np.float32)
    padded[:rows, :7] = left
    steps = next(s for s in policy.processor._pipeline.inverse if hasattr(s, "horizon"))
    commanded = replace(steps, horizon=8).inverse(padded, context)[:rows]
    found = policy.infer(observation, noise=noise, previous=Previous(commanded, delay=delay)).normalized
    expected = official.guided(observation, noise, left, delay=delay)
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(found[:delay, :7] - left[:delay]).max(initial=0.0) < 1e-5
    assert np.abs(found - policy.infer(observation, noise=noise).normalized).max() > 1e-2


def test_another_robot_is_another_policy(loaded, tmp_path):
    """The same weights with another embodiment's row differ: the row that is asked for is the one that is read."""
    policy, official = loaded(groot.LIBERO)
    directory = groot.write(tmp_path, embodiments={groot.LIBERO: 0, groot.DROID: 1})
    with pytest.raises(CheckpointError, match="2 robots.*assets=NAME"):
        innerloop.load(directory, device="cpu")
    other = innerloop.load(directory, device="cpu", precision="fp32", assets=groot.LIBERO)
    observation = observe(policy, 8)
    noise = np.zeros((8, groot.ACTION), np.float32)
    assert not compare(other, official, observation, noise).passed
    check(other, LeRobotGroot(directory, groot.LIBERO), observation)
    other.close()


def saved(official, directory):
    """What LeRobot's save_pretrained writes, with the sizes that it leaves to the base model."""
    official._before.save_pretrained(directory)
    official._after.save_pretrained(directory)
    official.policy.save_pretrained(directory)
    stated = json.loads((directory / "config.json").read_text())
    own = groot.config()
    stated["innerloop_architecture"] = {**own, **own["innerloop_architecture"]}
    (directory / "config.json").write_text(json.dumps(stated))
    for name, content in (
        ("tokenizer.json", qwen.tokenizer_json()),
        ("preprocessor_config.json", json.dumps(qwen.IMAGES)),
    ):
        (directory / name).write_text(content)
    return directory


@pytest.mark.parametrize("robot", [groot.LIBERO, groot.DROID])
def test_a_directory_that_lerobot_saved(loaded, robot, tmp_path):
    _, official = loaded(robot)
    decode = next(step for step in official._after.steps if hasattr(step, "action_decode_transform"))
    decode.action_decode_transform = "libero" if robot == groot.LIBERO else None
    policy = innerloop.load(saved(official, tmp_path), device="cpu", precision="fp32")
    report = check(policy, official, observe(policy, 11, ((48, 64),), "Stack it.", reach=1.5))
    decode.action_decode_transform = None
    if robot == groot.LIBERO:
        assert policy.processor.describe()["action"]["libero_gripper"] == 6
        assert report.stage("actions").max_abs < 1e-5
    policy.close()


def test_lerobots_own_statistics(loaded, tmp_path):
    """A fine-tuned policy of a new robot: one vector of state and one of actions, bounded by the data set's extremes."""
    _, official = loaded(groot.LIBERO)
    names = {"observation.state": 8, "action": 7}
    generator = np.random.default_rng(3)
    reach = {name: generator.uniform(0.5, 2, width).astype(np.float32) for name, width in names.items()}
    stats = {name: {"min": torch.from_numpy(-r), "max": torch.from_numpy(r)} for name, r in reach.items()}
    base = official.config.base_model_path
    official.config.base_model_path = str(tmp_path / "elsewhere")  # no processor files there
    before, after = require("lerobot.policies.groot.processor_groot").make_groot_pre_post_processors(
        official.config, stats
    )
    official.config.base_model_path = base
    chat = next(step for step in before.steps if hasattr(step, "use_albumentations"))
    chat.image_target_size, chat.image_crop_size, chat._proc = [24, 24], [21, 21], official._chat._proc
    policy, other = loaded(groot.LIBERO)
    kept = other._before, other._after
    other._before, other._after = before, after
    directory = saved(other, tmp_path / "saved")
    theirs = innerloop.load(directory, device="cpu", precision="fp32")
    frames = {name: qwen.picture(12 + i, 24, 24) for i, name in enumerate(policy.config.cameras)}
    observation = {"images": frames, "state": 2 * generator.standard_normal(8).astype(np.float32), "prompt": "Go."}
    report = compare(theirs, other, observation, np.zeros((8, groot.ACTION), np.float32))
    other._before, other._after = kept
    assert report.stage("state").max_abs <= 1e-6, report.text()
    assert report.stage("tokens").max_abs == 0, report.text()
    assert theirs.processor.describe()["embodiment"] == groot.LIBERO
    theirs.close()


def test_bf16_is_close(loaded, tmp_path):
    directory = groot.write(tmp_path)
    policy = innerloop.load(directory, device="cpu", precision="bf16", assets=groot.DROID)
    observation = observe(policy, 9)
    noise = np.random.default_rng(9).standard_normal((8, groot.ACTION)).astype(np.float32)
    report = compare(policy, LeRobotGroot(directory, groot.DROID), observation, noise)
    assert report.passed, report.text()
    theirs = LeRobotGroot(directory, groot.DROID, dtype="bfloat16").infer(observation, noise)
    assert np.abs(policy.infer(observation, noise=noise).normalized - theirs).max() < 0.1
    policy.close()


def test_both_sides_run_the_weights_that_lerobot_drew(monkeypatch):
    """A random model without files."""
    stated = groot.config()
    made = require("transformers").Qwen3VLConfig(**stated["innerloop_architecture"])
    monkeypatch.setattr(require("lerobot.policies.groot.groot_n1_7"), "_cosmos_reason2_qwen3_vl_config", lambda: made)
    config = replace(groot_config(stated), cameras=("one", "two"), patches=36)
    kind, placement = FAMILIES["groot"], place("cpu", "fp32", 1, "fused")
    processor = kind.synthetic(config)
    official = LeRobotGroot.random(processor, config, "cpu", "float32")
    policy = assemble(kind, config, placement, processor, official.weights(), NO_FILES)
    observation = observe(policy, 10, prompt="open it")
    noise = np.random.default_rng(0).standard_normal((8, groot.ACTION)).astype(np.float32)
    ours, theirs = policy.infer(observation, noise=noise).normalized, official.infer(observation, noise)
    assert np.abs(ours - theirs).max() < 1e-4
    policy.close()


def groot_config(stated):
    from innerloop.blocks import qwen3_vl
    from innerloop.policies.groot import config
    from innerloop.weights.fields import Fields

    fields = Fields("config.json", stated)
    return config._sized(fields, qwen3_vl.read_sizes(fields.section("innerloop_architecture")))
