"""starVLA's policies from run directories, against what its own modules computed on the same tensors."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_policies import course
from safetensors.numpy import save_file
from tokenizers import Tokenizer

import innerloop
from innerloop.blocks.dit import DiT
from innerloop.contract import CheckpointError, ObservationError, Previous
from innerloop.engine import LoadedPolicy
from innerloop.policies import FAMILIES
from innerloop.policies.starvla.config import ANSWER
from innerloop.process.build import Edge
from innerloop.process.fast import AnswerError, cosines
from innerloop.process.pipeline import Context
from innerloop.process.starvla import Scale
from recipes.tiny import qwen, starvla

GOLDEN = np.load("tests/golden/starvla.npz")
TOLERANCE = 1e-4  # fp32, normalised actions
FAMILY = {"QwenPI_v3": "starvla-pi3", "QwenPI": "starvla-pi", "QwenGR00T": "starvla-gr00t", "QwenOFT": "starvla-oft"}

Loaded = tuple[str, starvla.Run, LoadedPolicy]


@pytest.fixture(scope="module", params=sorted(set(starvla.CASES) - {"fast"}))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Each run in turn."""
    run = starvla.RUNS[request.param]
    policy = innerloop.load(starvla.write(tmp_path_factory.mktemp("run"), run), device="cpu")
    yield request.param, run, policy
    policy.close()


def seen(run: starvla.Run, case: starvla.Case) -> dict[str, Any]:
    """An observation as users give it."""
    observation = starvla.observation(run, case)
    return {key: observation[key] for key in ("images", "state", "prompt")}


def test_actions_are_those_of_the_official_modules(loaded: Loaded) -> None:
    name, run, policy = loaded
    for index, case in enumerate(starvla.CASES[name]):
        chunk = policy.infer(seen(run, case), noise=starvla.noise(run, case))
        np.testing.assert_allclose(chunk.normalized, GOLDEN[f"{name}.{index}"], atol=TOLERANCE, rtol=0)


def test_vision_is_under_way_before_the_host_turns_to_the_text(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    name, run, policy = loaded
    state = ["proprioception"] if policy.config.state_token else []
    order = course(policy, seen(run, starvla.CASES[name][0]), monkeypatch)
    assert order[:4] == ["grid", "resize", "vision", "text"]
    assert set("+".join(order[4:]).split("+")) == {"layout", "context", "action"} | {*state}


def test_family_and_every_tensor_accounted_for(loaded: Loaded) -> None:
    _, run, policy = loaded
    assert policy.family.name == FAMILY[run.framework]
    assert policy.account is not None
    assert len(policy.account.loaded) + len(policy.account.ignored) == len(starvla.shapes(run))
    unread = {
        "project_layers",
        "future_tokens",
        "state_encoder",
        "proj_out_",
        "lm_head",
        "language_model.norm",
        "language_model.layers.3",
    }
    assert all(any(part in name for part in unread) for name in policy.account.ignored)


def test_actions_in_robot_units(loaded: Loaded) -> None:
    name, run, policy = loaded
    case = starvla.CASES[name][0]
    chunk = policy.infer(seen(run, case), noise=starvla.noise(run, case))
    stats = starvla.statistics(run.seed)["made_up"]["action"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    expected = (chunk.normalized + 1) / 2 * (high - low) + low
    np.testing.assert_allclose(chunk.actions[:, :-1], expected[:, :-1], atol=1e-5)
    np.testing.assert_array_equal(chunk.actions[:, -1], chunk.normalized[:, -1] > 0.5)


def test_only_what_changed_is_refreshed(loaded: Loaded) -> None:
    name, run, policy = loaded
    case = starvla.CASES[name][0]
    observation, noise = seen(run, case), starvla.noise(run, case)
    first = policy.infer(observation, noise=noise)
    again = policy.infer(observation, noise=noise)
    assert again.receipt is not None
    assert set(again.receipt.stages) <= {"action"}
    np.testing.assert_array_equal(first.normalized, again.normalized)
    noisy = policy.infer(observation, noise=noise + 1)
    assert noisy.receipt is not None
    assert noisy.receipt.stages == (("action",) if run.framework != "QwenOFT" else ())
    camera = next(iter(observation["images"]))
    frames = {**observation["images"], camera: 255 - observation["images"][camera]}
    moved = policy.infer({**observation, "images": frames}, noise=noise)
    assert moved.receipt is not None
    assert moved.receipt.stages == ("resize", "vision", "context", "action")
    assert np.abs(moved.normalized - first.normalized).max() > 1e-3


def test_state_reaches_the_actions_where_the_run_took_it(loaded: Loaded) -> None:
    name, run, policy = loaded
    case = starvla.CASES[name][0]
    observation, noise = seen(run, case), starvla.noise(run, case)
    first = policy.infer(observation, noise=noise).normalized
    other = policy.infer({**observation, "state": observation["state"] + 0.3}, noise=noise).normalized
    assert bool(np.abs(other - first).max() > 1e-4) == bool(run.data.get("include_state"))


def test_every_capacity_gives_the_same_actions(loaded: Loaded) -> None:
    name, run, policy = loaded
    case = starvla.CASES[name][0]
    noise = starvla.noise(run, case)
    prepared = policy.processor.prepare(seen(run, case))
    inputs = {**prepared.inputs, "noise": noise}
    fitting = [capacity for capacity in policy.plans if capacity >= prepared.context.prompt_tokens]
    for index, capacity in enumerate(fitting):
        found = policy.runtime.decide(f"capacity-{index}", inputs, capacity).outputs["actions"]
        np.testing.assert_allclose(found, GOLDEN[f"{name}.0"], atol=TOLERANCE, rtol=0)


def test_bad_observations_are_refused(loaded: Loaded) -> None:
    name, run, policy = loaded
    case = starvla.CASES[name][0]
    observation = seen(run, case)
    with pytest.raises(ObservationError, match="cameras do not match"):
        policy.infer({**observation, "images": {"elsewhere": observation["images"]["front"]}})
    with pytest.raises(ObservationError, match="there is room for"):
        policy.infer({**observation, "prompt": "the user " * 2000})
    with pytest.raises(ObservationError, match="previous"):
        policy.processor.guidance(Previous(np.zeros((2, starvla.DIMS), np.float32), delay=1), None)


def test_bf16_is_near(tmp_path: Path) -> None:
    run, case = starvla.RUNS["pi3"], starvla.CASES["pi3"][0]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cpu", precision="bf16")
    chunk = policy.infer(seen(run, case), noise=starvla.noise(run, case))
    assert np.abs(chunk.normalized - GOLDEN["pi3.0"]).max() < 0.1
    policy.close()


@pytest.mark.parametrize("name", sorted(family for family in FAMILIES if family.startswith("starvla")))
def test_published_size_takes_a_made_up_observation(name: str) -> None:
    family = FAMILIES[name]
    config = family.default(1, 16, 4)
    processor = family.synthetic(config)
    frame = np.zeros((480, 640, 3), np.uint8)
    observation = {
        "images": dict.fromkeys(config.cameras, frame),
        "state": np.zeros(processor.widths.state, np.float32),
        "prompt": "pick up the red block",
    }
    prepared = processor.prepare(observation)
    assert prepared.inputs["grids"].tolist() == [[14, 14] if config.image_size else [30, 40]]
    assert 0 < prepared.context.prompt_tokens <= config.prompt_capacity
    sample = family.sample(config, 1, config.prompt_capacity)
    assert set(prepared.inputs) | {"noise"} == set(sample)
    made_up = np.arange(ANSWER, dtype=np.int32) if name == "starvla-fast" else np.zeros((16, 7), np.float32)
    assert processor.finish(made_up, prepared.context).shape == (16, 7)


def test_packed_products_mean_the_same(tmp_path: Path) -> None:
    run, case = starvla.RUNS["gr00t"], starvla.CASES["gr00t"][0]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cpu")
    assert policy.config.head_tokens == run.chunk + 6 + 1  # future tokens and the state
    assert policy.model.head.dit.pack()
    chunk = policy.infer(seen(run, case), noise=starvla.noise(run, case))
    np.testing.assert_allclose(chunk.normalized, GOLDEN["gr00t.0"], atol=TOLERANCE, rtol=0)
    policy.close()


def test_a_width_that_fills_no_warp_is_not_packed() -> None:
    config = FAMILIES["starvla-pi3"].default(1, 16, 4)
    assert config.head_tokens == 16  # the future tokens reach no action
    assert config.dit is not None
    assert not DiT(replace(config.dit, heads=1, depth=1)).pack()
    assert not DiT(replace(config.dit, heads=40, depth=1)).pack()


def test_two_robots_in_one_batch(tmp_path: Path) -> None:
    run, cases = starvla.RUNS["pi3"], starvla.CASES["pi3"]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cpu", batch=2)
    assert policy.batched is not None
    prepared = [policy.processor.prepare(seen(run, case)) for case in cases[:2]]
    capacity = policy.capacity(max(row.context.prompt_tokens for row in prepared))
    inputs = [row.inputs | {"noise": starvla.noise(run, case)} for row, case in zip(prepared, cases, strict=False)]
    found = policy.batched.decide("both", inputs, capacity).outputs["actions"]
    for index in range(2):
        np.testing.assert_allclose(found[index], GOLDEN[f"pi3.{index}"], atol=TOLERANCE, rtol=0)
    policy.close()


def test_an_answer_is_the_official_modules_ids(tmp_path: Path) -> None:
    run = starvla.RUNS["fast"]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cpu")
    assert policy.family.name == "starvla-fast"
    for index, case in enumerate(starvla.CASES["fast"]):
        prepared = policy.processor.prepare(seen(run, case))
        inputs = prepared.inputs | {"noise": starvla.noise(run, case)}
        decision = policy.runtime.decide("answer", inputs, policy.capacity(prepared.context.prompt_tokens))
        theirs = GOLDEN[f"fast.{index}"]
        np.testing.assert_array_equal(decision.outputs["actions"][: len(theirs)], theirs)
    with pytest.raises(AnswerError, match="no action is returned"):  # random weights do not answer with a chunk
        policy.infer(seen(run, starvla.CASES["fast"][0]))
    _check_decoding(policy, run)
    policy.close()


def _check_decoding(policy: LoadedPolicy, run: starvla.Run) -> None:
    coefficients = np.random.default_rng(0).integers(-20, 20, (run.chunk, starvla.DIMS))
    coefficients[0, :3] = 1  # "AAA" is one token
    tokenizer = Tokenizer.from_str(starvla.fast_json())
    fast = tokenizer.encode("".join(chr(value + 64) for value in coefficients.ravel())).ids
    assert len(fast) < coefficients.size
    ids = qwen.token_ids()
    answer = [ids[f"<robot_action_{token}>"] for token in fast]
    whole = np.array([*answer[:5], ids["<|image_pad|>"], *answer[5:], ids["<|im_end|>"], answer[0]], np.int32)
    actions = policy.processor.finish(whole, Context(np.zeros(1), 1, "", np.zeros(1, np.float32)))
    normalized = cosines(run.chunk).T @ (coefficients / 10)
    stats = starvla.statistics(run.seed)["made_up"]["action"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    np.testing.assert_allclose(actions[:, :-1], ((normalized + 1) / 2 * (high - low) + low)[:, :-1], atol=1e-5)


def test_the_cosine_transform_is_orthonormal() -> None:
    matrix = cosines(5)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(matrix @ np.ones(5), [5**0.5, 0, 0, 0, 0], atol=1e-12)


def test_a_run_without_its_action_tokenizer_says_where_it_goes(tmp_path: Path) -> None:
    directory = starvla.write(tmp_path, starvla.RUNS["fast"])
    (directory / "fast" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"fast/tokenizer\.json"):
        innerloop.load(directory, device="cpu")


def edited(directory: Path, run: starvla.Run, **sections: Any) -> Path:
    """A run directory whose config.yaml has some sections replaced."""
    starvla.write(directory, run)
    config = starvla.configuration(run)
    (directory / "config.yaml").write_text(json.dumps({**config, **sections}))
    return directory


def test_a_run_of_unknown_data_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="innerloop: {cameras"):
        innerloop.load(edited(tmp_path, starvla.RUNS["pi3"], innerloop={}), device="cpu")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"innerloop": {"cameras": "front", "action": "q99", "state": "q99"}}, r"cameras is 'front'; it takes a list"),
        ({"innerloop": ["front"]}, r"yaml: innerloop is \['front'\]; it must be a section of names"),
        ({"datasets": {"vla_data": "made_up"}}, r"datasets\.vla_data is 'made_up'; it must be a section"),
    ],
)
def test_sections_of_another_kind_are_named(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        innerloop.load(edited(tmp_path, starvla.RUNS["oft"], **sections), device="cpu")


@pytest.mark.parametrize("content", [{"made_up": 3}, {"made_up": {"action": [1.0, 2.0]}}])
def test_statistics_of_another_kind_are_named(tmp_path: Path, content: Any) -> None:
    path = starvla.write(tmp_path, starvla.RUNS["oft"]) / "dataset_statistics.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"dataset_statistics\.json: 'made_up' has no statistics of '.*' by name"):
        innerloop.load(tmp_path, device="cpu")


@pytest.mark.parametrize(("name", "value"), [("q01", 0.5), ("q99", [1.0]), ("mask", [True])])
def test_statistics_that_do_not_match_are_named(tmp_path: Path, name: str, value: Any) -> None:
    run = starvla.RUNS["oft"]
    path = starvla.write(tmp_path, run) / "dataset_statistics.json"
    content = starvla.statistics(run.seed)
    content["made_up"]["action"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'action': q01 has shape .*; each is one number, or flag, a dimension"):
        innerloop.load(tmp_path, device="cpu")


def test_known_data_needs_no_addition(tmp_path: Path) -> None:
    run = replace(starvla.RUNS["oft"], data={"data_mix": "libero_all"})
    directory = edited(tmp_path, run, innerloop={})
    policy = innerloop.load(edited(directory, run, innerloop={}), device="cpu")
    assert policy.config.cameras == ("primary_image", "wrist_image")
    assert policy.config.robot.action == "min_max"
    policy.close()


@pytest.mark.parametrize("before", ["module.", "other."])
def test_weights_saved_by_a_parallel_trainer_load_and_others_are_named(tmp_path: Path, before: str) -> None:
    run = starvla.RUNS["oft"]
    file = next(starvla.write(tmp_path, run).glob("checkpoints/*"))
    save_file({f"{before}{name}": value for name, value in starvla.tensors(run).items()}, file)
    if before == "module.":
        innerloop.load(tmp_path, device="cpu").close()
        return
    with pytest.raises(CheckpointError, match=r"hold no 'qwen_vl_interface\..*'; copy them from the run again"):
        innerloop.load(tmp_path, device="cpu")


def test_what_the_head_does_not_know_is_refused(tmp_path: Path) -> None:
    run = replace(starvla.RUNS["pi3"], dit={**starvla.RUNS["pi3"].dit, "positional_embeddings": "sinusoidal"})
    with pytest.raises(CheckpointError, match="positional_embeddings"):
        innerloop.load(starvla.write(tmp_path, run), device="cpu")


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (Edge(normalization="IDENTITY"), "cannot be normalised by 'IDENTITY'; a starVLA run has q99"),
        (Edge(relative=(True,) * starvla.DIMS), "leave them out"),
        (Edge(state_in_prompt=True), "leave them out"),
    ],
)
def test_what_a_run_says_itself_is_not_asked_of_the_caller(tmp_path: Path, edge: Edge, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        innerloop.load(starvla.write(tmp_path, starvla.RUNS["pi3"]), device="cpu", edge=edge)


def test_a_tokenizer_that_merges_placeholders_is_refused(tmp_path: Path) -> None:
    file = next(starvla.write(tmp_path, starvla.RUNS["oft"]).rglob("tokenizer.json"))
    content = json.loads(file.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": 2 * qwen.QUERY})
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"placeholders .*use the tokenizer\.json that the run"):
        innerloop.load(tmp_path, device="cpu")


def test_statistics_of_several_data_sets_need_a_choice(tmp_path: Path) -> None:
    run = starvla.RUNS["oft"]
    path = starvla.write(tmp_path, run) / "dataset_statistics.json"
    stats = starvla.statistics(run.seed)["made_up"]
    path.write_text(json.dumps({"made_up": stats, "other": stats}))
    with pytest.raises(CheckpointError, match="assets=NAME"):
        innerloop.load(tmp_path, device="cpu")
    policy = innerloop.load(tmp_path, device="cpu", assets="other")
    assert policy.statistics == "other"
    policy.close()


def test_the_latest_step_is_taken_and_said(tmp_path: Path) -> None:
    run = starvla.RUNS["oft"]
    place = starvla.write(tmp_path, run) / "checkpoints"
    (place / "steps_9_model.safetensors").write_bytes(b"not read")
    policy = innerloop.load(tmp_path / "checkpoints", device="cpu")
    assert any("steps_10" in note for note in policy.notes)
    policy.close()


def test_a_torch_file_is_read_as_well(tmp_path: Path) -> None:
    run, case = starvla.RUNS["oft"], starvla.CASES["oft"][0]
    place = starvla.write(tmp_path, run) / "checkpoints"
    tensors = {name: torch.from_numpy(value) for name, value in starvla.tensors(run).items()}
    torch.save(tensors, place / "steps_20_pytorch_model.pt")
    (place / "steps_10_model.safetensors").unlink()
    policy = innerloop.load(tmp_path, device="cpu")
    np.testing.assert_allclose(policy.infer(seen(run, case)).normalized, GOLDEN["oft.0"], atol=TOLERANCE, rtol=0)
    policy.close()


def test_scale_of_ranges_without_width() -> None:
    stats = {"q01": np.array([0.0, 1.0]), "q99": np.array([0.0, 3.0]), "min": np.zeros(2), "max": np.array([0.0, 2.0])}
    value = np.array([7.0, 9.0])
    quantiles = Scale.of("q99", stats, "state", gripper_raw=False)
    np.testing.assert_allclose(quantiles.apply(value), [2.2, 2.2])  # starVLA clamps, the value itself included
    bounds = Scale.of("min_max", stats, "state", gripper_raw=False)
    np.testing.assert_allclose(bounds.apply(value), [0.0, 8.0])
    with pytest.raises(CheckpointError, match="mean and std"):
        Scale.of("mean_std", stats, "action", gripper_raw=False)


def test_a_gripper_that_was_not_normalised_passes_as_it_is() -> None:
    stats = {"min": np.array([0.0, 0.2]), "max": np.array([4.0, 0.7])}
    scale = Scale.of("min_max", stats, "action", gripper_raw=True)
    np.testing.assert_allclose(scale.invert(np.array([[0.5, 0.37]])), [[3.0, 0.37]], atol=1e-6)
