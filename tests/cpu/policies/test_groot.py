"""GR00T N1.7 from Isaac-GR00T directories, against what LeRobot computed on the same tensors (scripts/make_groot_goldens.py)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_policies import course

import innerloop
from innerloop.contract import CheckpointError, ObservationError, Previous
from innerloop.engine import LoadedPolicy, sketch
from innerloop.measure.parity import intermediates
from innerloop.policies import FAMILIES, detect
from innerloop.policies.groot import config, plan
from innerloop.process import Edge
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter
from innerloop.weights import open_checkpoint
from recipes.tiny import groot

GOLDEN = np.load("tests/golden/groot.npz")
EVERY = 4  # tokens whose features are kept


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return groot.write(tmp_path_factory.mktemp("groot"))


@pytest.fixture(scope="module")
def droid(directory: Path) -> Iterator[LoadedPolicy]:
    policy = innerloop.load(directory, device="cpu", assets=groot.DROID)
    yield policy
    policy.close()


@pytest.mark.parametrize("name", sorted(groot.CASES))
def test_every_stage_is_the_official_one(name: str, tmp_path: Path) -> None:
    case = groot.CASES[name]
    policy = innerloop.load(groot.write(tmp_path, **case.settings), device="cpu", assets=case.robot)
    seen = intermediates(policy, groot.observation(case), groot.noise(case))
    policy.close()
    seen["pixels"] = np.rint((seen["pixels"] + 1) * 127.5).astype(np.uint8)
    for stage in ("tokens", "grids", "pixels", "position_ids"):
        assert np.array_equal(seen[stage], GOLDEN[f"{name}.{stage}"]), stage
    for stage in ("state", "vision", "features", "refined", "state_token", "normalized", "actions"):
        ours = seen[stage][::EVERY] if stage in ("features", "refined") else seen[stage]
        theirs = GOLDEN[f"{name}.{stage}"]
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max()), stage


def test_vision_is_under_way_before_the_host_turns_to_the_text(
    droid: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = course(droid, groot.observation(groot.CASES["droid"]), monkeypatch)
    assert order[:4] == ["grid", "resize", "vision", "text"]
    assert {"layout+masks", "context", "proprioception", "action"} <= set(order[4:])


def stages(policy: LoadedPolicy, observation: dict[str, Any], seed: int, session: str = "refresh") -> set[str]:
    receipt = policy.infer(observation, seed=seed, session=session).receipt
    assert receipt is not None
    return set(receipt.stages)


def test_only_what_changed_runs_again(droid: LoadedPolicy) -> None:
    observation = groot.observation(groot.CASES["droid"])
    everything = {"grid", "layout", "masks", "resize", "vision", "context", "proprioception", "action"}
    assert stages(droid, observation, 0) == everything
    assert stages(droid, observation, 1) == {"action"}
    state = {**observation, "state": observation["state"] + 0.1}
    assert stages(droid, state, 1) == {"proprioception", "action"}
    frames = {name: 255 - frame for name, frame in observation["images"].items()}
    assert stages(droid, {**state, "images": frames}, 1) == {"resize", "vision", "context", "action"}
    renamed = {**state, "images": frames, "prompt": "push it: off!"}
    assert stages(droid, renamed, 1) <= {"layout", "masks", "context", "action"}


def test_skipping_and_capacities_change_no_result(droid: LoadedPolicy) -> None:
    plans = list(droid.plans.values())
    case = groot.CASES["droid"]
    inputs = {**droid.processor.prepare(groot.observation(case)).inputs, "noise": groot.noise(case)}
    found = []
    for one in plans:
        interpreter = Interpreter(plans, Arena(plans), check=True)  # refuses what a stage does not declare
        for name, value in inputs.items():
            interpreter.write(name, value)
        interpreter.run(one, skip=False)
        found.append(interpreter.read("actions").clone())
    assert all(torch.allclose(found[0], other, atol=1e-5) for other in found[1:])


def test_rows_of_a_batch_do_not_meet(directory: Path) -> None:
    """Another robot's length and picture sizes in the same batch leave a row's actions as they are."""
    policy = innerloop.load(directory, device="cpu", assets=groot.DROID, batch=2)
    assert policy.batched is not None
    cases = [groot.CASES["droid"], groot.CASES["long"]]
    prepared = [policy.processor.prepare(groot.observation(case)) for case in cases]
    rows = [{**p.inputs, "noise": groot.noise(case)} for p, case in zip(prepared, cases, strict=True)]
    capacity = max(policy.capacity(p.context.prompt_tokens) for p in prepared)
    together = policy.batched.decide("both", rows, capacity).outputs["actions"]
    twice = policy.batched.decide("same", [rows[0], rows[0]], capacity).outputs["actions"]
    policy.close()
    for row in twice:
        assert np.abs(together[0] - row).max() < 1e-5
    assert np.abs(together[0][:, :17] - GOLDEN["droid.normalized"]).max() < 1e-4
    assert np.abs(together[1] - together[0]).max() > 1e-2


def test_published_size() -> None:
    """models' exact count, 3,144,016,000, less the final norm of the language model, which nobody reads."""
    family = FAMILIES["groot"]
    sizes = family.default(2, 40, 4)
    with torch.device("meta"):
        model = family.model(sizes)
    assert sum(p.numel() for p in model.parameters()) == 3_144_016_000 - 2048
    assert plan.capacities(sizes) == (169, 201, 265)
    prepared = family.synthetic(sizes).prepare(
        {
            "images": {name: np.zeros((480, 640, 3), np.uint8) for name in sizes.cameras},
            "state": np.zeros(132, np.float32),
            "prompt": "pick it up",
        }
    )
    assert prepared.inputs["grids"].tolist() == [[16, 16]] * 2


def test_metadata_and_sketch(directory: Path, droid: LoadedPolicy) -> None:
    libero = innerloop.load(directory, device="cpu", assets=groot.LIBERO)
    assert libero.metadata["horizon"] == 6  # of the 8 that are solved
    assert libero.metadata["state_groups"] == {"x": 6, "gripper": 2}
    assert libero.metadata["action_groups"] == {"x": 6, "gripper": 1}
    libero.close()
    assert (droid.metadata["policy"], droid.metadata["horizon"]) == ("groot", 8)
    assert (droid.metadata["state_dim"], droid.metadata["action_dim"]) == (17, 17)
    assert droid.metadata["cameras"] == ["exterior", "wrist"]
    receipt = droid.infer(groot.observation(groot.CASES["droid"]), seed=0).receipt
    assert receipt is not None
    assert receipt.statistics == groot.DROID
    assert json.dumps(droid.metadata)
    assert detect(open_checkpoint(directory, assets=groot.LIBERO)).name == "groot"
    assert sketch(directory, assets=groot.LIBERO).details["cameras"] == ["image", "wrist_image"]


def test_the_fingerprint_knows_the_robot_and_the_processing(
    directory: Path, tmp_path: Path, droid: LoadedPolicy
) -> None:
    marks = {droid.fingerprint}
    for place, settings in ((directory, None), (tmp_path, {"clip_outliers": False})):
        where = place if settings is None else groot.write(place, **settings)
        robot = groot.LIBERO if settings is None else groot.DROID
        policy = innerloop.load(where, device="cpu", assets=robot)
        marks.add(policy.fingerprint)
        policy.close()
    assert len(marks) == 3


def test_a_chunk_is_continued(droid: LoadedPolicy) -> None:
    """Rows that are executed meanwhile are the ones commanded, though places and joints are seen from another state.

    The six numbers of a rotation are made orthonormal on the way out, and then leave the made-up statistics' range.
    """
    observation = groot.observation(groot.CASES["droid"])
    first = droid.infer(observation, seed=0)
    later = {**observation, "state": observation["state"] + 0.02}
    small = 0.2 * first.normalized  # within every range, and so not clipped
    commanded = droid.processor.finish(small, droid.processor.prepare(observation).context)
    found = droid.infer(later, seed=1, previous=Previous(commanded[:5], delay=3))
    exact = [0, 1, 2, *range(9, 17)]
    assert np.abs(found.actions[:3, exact] - commanded[:3, exact]).max() < 1e-5
    assert np.abs(found.actions - droid.infer(later, seed=1).actions).max() > 1e-2
    with pytest.raises(ObservationError, match="not trained to be given a prefix.*mode realtime"):
        droid.infer(later, seed=1, previous=Previous(commanded[:5], delay=3, schedule="PREFIX"))


def test_too_long_a_prompt_and_too_wide_a_frame_are_refused(droid: LoadedPolicy) -> None:
    observation = groot.observation(groot.CASES["droid"])
    with pytest.raises(ObservationError, match="tokens, there is room for"):
        droid.infer({**observation, "prompt": "word " * 200})
    wide = {name: np.zeros((24, 96, 3), np.uint8) for name in observation["images"]}
    with pytest.raises(ObservationError, match="24x96.*patches.*smaller|becomes.*patches"):
        droid.infer({**observation, "images": wide})


def changed(directory: Path, name: str, change: dict[str, Any], drop: tuple[str, ...] = ()) -> None:
    path = directory / name
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps({**content, **change}))


@pytest.mark.parametrize(
    ("change", "drop", "words"),
    [
        ({"use_vlln": False}, (), "use_vlln.*another model"),
        ({"select_layer": 99}, (), "select_layer is 99"),
        ({"action_horizon": "ten"}, (), "action_horizon is 'ten'"),
        ({}, ("diffusion_model_cfg",), "no 'diffusion_model_cfg'"),
        ({"input_embedding_dim": 64}, (), "input_embedding_dim is 64"),
        ({"max_num_embodiments": 3}, (), "row 3 of 3"),
    ],
)
def test_a_config_that_contradicts_is_named(
    tmp_path: Path, change: dict[str, Any], drop: tuple[str, ...], words: str
) -> None:
    changed(groot.write(tmp_path), "config.json", change, drop)
    with pytest.raises(CheckpointError, match=words):
        config.read(open_checkpoint(tmp_path, assets=groot.DROID), None)


def test_horizon_must_not_contradict(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="horizon=3.*action_horizon 8"):
        config.read(open_checkpoint(directory, assets=groot.DROID), 3)


def test_what_the_files_say_is_not_asked_of_the_caller(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="state_dim were given"):
        innerloop.load(directory, device="cpu", assets=groot.LIBERO, edge=Edge(state_dim=8))


def test_a_missing_tokenizer_is_asked_for_and_may_lie_elsewhere(directory: Path, tmp_path: Path) -> None:
    place = groot.write(tmp_path / "bare")
    (place / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"no tokenizer.json.*Cosmos-Reason2.*tokenizer="):
        innerloop.load(place, device="cpu", assets=groot.LIBERO)
    policy = innerloop.load(place, device="cpu", assets=groot.LIBERO, edge=Edge(tokenizer=tmp_path))
    assert policy.infer(groot.observation(groot.CASES["libero"]), seed=0).actions.shape == (6, 7)
    policy.close()
