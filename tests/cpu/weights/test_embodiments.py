"""Robots of a GR00T checkpoint: chosen by name, with their own numbers, or refused with what is missing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from innerloop.contract import CheckpointError
from innerloop.process.chat import framing
from innerloop.weights import ProcessorStep, open_checkpoint
from innerloop.weights.embodiments import embodiment
from recipes.tiny import groot


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return groot.write(tmp_path)


def test_one_robot_is_read(directory: Path) -> None:
    checkpoint = open_checkpoint(directory, assets=groot.DROID)
    found = embodiment(checkpoint)
    assert (checkpoint.layout, checkpoint.assets, found.name, found.index) == ("groot", groot.DROID, groot.DROID, 3)
    assert checkpoint.statistics["relative_action.eef_9d"]["min"].shape == (8, 9)
    assert set(found.statistics["state"]) == {"eef_9d", "gripper_position", "joint_position"}
    assert found.modality["video"]["modality_keys"] == ["exterior", "wrist"]
    assert "modality_configs" not in found.settings


def test_several_robots_need_a_choice(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="serves 2 robots.*libero_sim.*assets=NAME"):
        open_checkpoint(directory)
    with pytest.raises(CheckpointError, match="no robot 'gr1'.*libero_sim"):
        open_checkpoint(directory, assets="gr1")


def test_older_models_are_refused(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "gr00t_n1_5"}))
    with pytest.raises(CheckpointError, match=r"is a gr00t_n1_5; of GR00T only N1\.7"):
        open_checkpoint(directory)


def test_an_only_robot_is_taken(directory: Path) -> None:
    path = directory / "statistics.json"
    path.write_text(json.dumps({groot.LIBERO: json.loads(path.read_text())[groot.LIBERO]}))
    assert open_checkpoint(directory).assets == groot.LIBERO


def test_a_robot_without_a_number_is_refused(directory: Path) -> None:
    (directory / "embodiment_id.json").write_text(json.dumps({groot.LIBERO: 2}))
    with pytest.raises(CheckpointError, match="gives 'oxe_droid.*no number.*plausible and be wrong"):
        open_checkpoint(directory, assets=groot.DROID)


@pytest.mark.parametrize("name", ["statistics.json", "processor_config.json", "embodiment_id.json"])
def test_missing_files_are_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        open_checkpoint(directory, assets=groot.DROID)


def test_statistics_that_are_not_finite_are_named(directory: Path) -> None:
    path = directory / "statistics.json"
    content = json.loads(path.read_text())
    content[groot.LIBERO]["state"]["x"]["q99"][0] = float("nan")
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"libero_sim state\.x: q99 is not finite"):
        open_checkpoint(directory, assets=groot.LIBERO)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "libero_sim is 'None', not statistics by name"),
        ({"state": [1.0]}, "libero_sim state is .* not statistics by name"),
        ({"state": {"x": 3}}, r"libero_sim state\.x is '3', not statistics by name"),
        ({"state": {"x": {"min": ["low"]}}}, r"libero_sim state\.x: min is not numbers"),
    ],
)
def test_statistics_that_are_none_are_named(directory: Path, value: Any, message: str) -> None:
    path = directory / "statistics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), groot.LIBERO: value}))
    with pytest.raises(CheckpointError, match=f"statistics.json {message}"):
        open_checkpoint(directory, assets=groot.LIBERO)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "'modality_configs' of 'libero_sim' is 'None'"),
        ({"video": ["image"]}, r"'video' of 'libero_sim' is"),
        ({"video": {"modality_keys": "image"}}, "video.modality_keys of 'libero_sim' is 'image', not a list of str"),
        ({"state": {"delta_indices": 3}}, "state.delta_indices of 'libero_sim' is '3', not a list of int"),
        ({"action": {"action_configs": ["ABSOLUTE"]}}, "action.action_configs .* not a list of dict"),
    ],
)
def test_modalities_that_are_none_are_named(directory: Path, value: Any, message: str) -> None:
    path = directory / "processor_config.json"
    content = json.loads(path.read_text())
    content["processor_kwargs"]["modality_configs"][groot.LIBERO] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"the processor's {message}"):
        embodiment(open_checkpoint(directory, assets=groot.LIBERO))


@pytest.mark.parametrize(
    "settings", [{"image_target_size": 256}, {"image_target_size": [0, 4]}, {"crop_fraction": "x"}]
)
def test_picture_sizes_that_are_none_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"(image_target_size|crop_fraction) is .*; it must be"):
        framing({"image_target_size": [256, 256], "image_crop_size": [230, 230], **settings})


def test_other_lerobot_processors_are_refused() -> None:
    steps = (ProcessorStep("normalizer_processor"),)
    saved: Any = SimpleNamespace(config={}, statistics={}, preprocessor=steps, postprocessor=None)
    with pytest.raises(CheckpointError, match="no GR00T N1.7 steps"):
        embodiment(saved)
