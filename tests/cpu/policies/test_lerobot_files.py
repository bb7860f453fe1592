"""Files of a LeRobot directory: statistics that are not where or what they should be, weights in shards."""

import json
import shutil
from pathlib import Path

import pytest
from loaded_policies import CHECKPOINTS, observe
from safetensors.torch import load_file, save_file

import innerloop
from innerloop.contract import CheckpointError


def test_statistics_of_a_lerobot_directory_under_another_key(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "c"))
    file = next(directory.glob("policy_postprocessor_step_*_unnormalizer_processor.safetensors"))
    before = next(directory.glob("policy_preprocessor_step_*_normalizer_processor.safetensors"))
    for path in (file, before):
        stored = load_file(path)
        save_file({name.replace("action.", "so100.buffer.action."): t for name, t in stored.items()}, path)
    with pytest.raises(CheckpointError, match="no statistics for 'action'.*so100.buffer.action"):
        innerloop.load(directory, device="cpu")
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist; copy it there"):
        innerloop.load(directory, device="cpu")
    (directory / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match="no policy_postprocessor.json.*normalisation is unknown"):
        innerloop.load(directory, device="cpu")


def test_statistics_of_another_mode_than_the_config_says(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "c"))
    config = json.loads((directory / "config.json").read_text())
    config["normalization_mapping"]["ACTION"] = "MEAN_STD"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="contradict: config.json says MEAN_STD, .*says QUANTILES"):
        innerloop.load(directory, device="cpu")


def test_shards_are_the_same_policy_and_a_broken_one_is_refused_before_the_memory_plan(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "sharded"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    placed: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        held = {name: tensors[name] for name in sorted(tensors)[part::3]}
        save_file(held, directory / file)
        placed |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    whole, sharded = (innerloop.load(path, device="cpu") for path in (CHECKPOINTS["pi05"], directory))
    assert whole.fingerprint == sharded.fingerprint
    observation = observe(whole, 0)
    assert whole.infer(observation, seed=0).actions.tobytes() == sharded.infer(observation, seed=0).actions.tobytes()
    whole.close()
    sharded.close()
    said: list[str] = []
    shard = directory / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated.*export it again"):
        innerloop.load(directory, device="cpu", announce=said.append)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards .* do not exist: {shard.name}; download"):
        innerloop.load(directory, device="cpu", announce=said.append)
    assert not said
