"""Opening a directory: what is recognised, what is chosen, and everything that is refused with a remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from directories import ACTION, STATE, norm_stats, write_json
from safetensors.torch import load_file, save_file

from innerloop.contract.errors import CheckpointError
from innerloop.weights import open_checkpoint
from innerloop.weights.processors import ProcessorStep


def test_lerobot_directory(lerobot: Path, unchanged: Callable[[], None]) -> None:
    unchanged()
    checkpoint = open_checkpoint(str(lerobot))
    assert checkpoint.layout == "lerobot"
    assert checkpoint.config == {"type": "pi05", "chunk_size": 4}
    assert checkpoint.preprocessor is not None
    assert [step.name for step in checkpoint.preprocessor] == ["normalizer_processor", "device_processor"]
    assert checkpoint.preprocessor[0].config == {"eps": 1e-8}
    assert checkpoint.preprocessor[1] == ProcessorStep("device_processor")
    assert checkpoint.statistics["action"]["std"].tolist() == [1.0] * ACTION
    assert checkpoint.statistics["observation.state"]["mean"].dtype == np.float32
    assert checkpoint.tokenizer == lerobot / "tokenizer.json"
    assert (checkpoint.assets, checkpoint.adapter, checkpoint.notes) == (None, None, ())


def test_openpi_directory(openpi: Path, unchanged: Callable[[], None]) -> None:
    unchanged()
    checkpoint = open_checkpoint(openpi)
    assert (checkpoint.layout, checkpoint.config, checkpoint.preprocessor) == ("openpi", {}, None)
    assert checkpoint.assets == "lab/arm"
    assert sorted(checkpoint.statistics) == ["action", "observation.state"]
    assert checkpoint.statistics["observation.state"]["q99"].tolist() == [1.0] * STATE
    assert sorted(checkpoint.statistics["action"]) == ["mean", "std"], "absent quantiles are left out"
    assert checkpoint.statistics["action"]["std"].dtype == np.float64


def test_actions_come_from_the_unnormalizer_and_states_from_the_normalizer(lerobot: Path) -> None:
    file = lerobot / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    save_file({"observation.state.mean": torch.ones(STATE), "action.std": torch.full((ACTION,), 3.0)}, file)
    statistics = open_checkpoint(lerobot).statistics
    assert statistics["observation.state"]["mean"].tolist() == [0.0] * STATE
    assert statistics["action"]["std"].tolist() == [3.0] * ACTION


@pytest.mark.parametrize(
    ("config", "extra", "layout"),
    [
        ({}, "dataset_statistics.json", "starvla"),
        ({"architectures": ["Other"]}, "", "transformers"),
    ],
)
def test_other_layouts_are_named(tmp_path: Path, config: dict[str, object], extra: str, layout: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", config)
    if extra:
        write_json(tmp_path / extra, {})
    assert open_checkpoint(tmp_path).layout == layout


def test_unknown_layout(tmp_path: Path) -> None:
    save_file({"some.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no known layout.*'some\.weight'"):
        open_checkpoint(tmp_path)


def test_several_statistics_sets_need_a_choice(openpi: Path) -> None:
    for name in ("b", "c"):
        write_json(openpi / "assets" / name / "norm_stats.json", norm_stats(shift=5.0))
    with pytest.raises(CheckpointError, match=r"3 sets of statistics \(b, c, lab/arm\): choose one with assets="):
        open_checkpoint(openpi)
    chosen = open_checkpoint(openpi, assets="c")
    assert chosen.assets == "c"
    assert chosen.statistics["observation.state"]["mean"].tolist() == [5.0] * STATE
    with pytest.raises(CheckpointError, match=r"no statistics 'd'.*there are: b, c, lab/arm"):
        open_checkpoint(openpi, assets="d")


def test_statistics_from_elsewhere(openpi: Path, tmp_path: Path) -> None:
    path = write_json(tmp_path / "mine" / "norm_stats.json", norm_stats(shift=2.0))
    for choice in (path, path.parent):
        checkpoint = open_checkpoint(openpi, assets=str(choice))
        assert checkpoint.statistics["action"]["mean"].tolist() == [2.0] * ACTION


def test_openpi_without_statistics_has_none(openpi: Path) -> None:
    shutil.rmtree(openpi / "assets")
    assert open_checkpoint(openpi).statistics == {}


def test_a_choice_where_there_is_none_to_make(lerobot: Path) -> None:
    with pytest.raises(CheckpointError, match="lerobot checkpoint with one set of statistics: leave assets out"):
        open_checkpoint(lerobot, assets="c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state": {}}, "no 'norm_stats'"),
        ({"norm_stats": {"state": {"mean": ["x"]}}}, "'state' are not arrays of numbers"),
        ({"norm_stats": {"state": {"mean": [float("nan")]}}}, r"'observation\.state\.mean' is not finite"),
        ({"norm_stats": {"actions": {"std": [float("inf")]}}}, r"'action\.std' is not finite"),
    ],
)
def test_statistics_that_are_not_usable(openpi: Path, content: object, message: str) -> None:
    write_json(openpi / "assets" / "lab" / "arm" / "norm_stats.json", content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(openpi)


def test_lerobot_statistics_that_are_not_finite(lerobot: Path) -> None:
    file = lerobot / "policy_preprocessor_step_0_normalizer_processor.safetensors"
    save_file({"observation.state.mean": torch.tensor([float("nan")])}, file)
    with pytest.raises(CheckpointError, match=r"'observation\.state\.mean' is not finite"):
        open_checkpoint(lerobot)


def test_missing_state_file(lerobot: Path) -> None:
    (lerobot / "policy_preprocessor_step_0_normalizer_processor.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json needs policy_preprocessor_step_0_.* copy it"):
        open_checkpoint(lerobot)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"name": "x"}, "no list of steps"),
        ({"steps": [{"config": {}}]}, "neither registry_name nor class"),
        ({"steps": [{"class": "a.B", "state_file": "../x.safetensors"}]}, "outside its directory"),
    ],
)
def test_damaged_processor_json(lerobot: Path, content: object, message: str) -> None:
    write_json(lerobot / "policy_postprocessor.json", content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(lerobot)


def test_lerobot_before_processors_existed(lerobot: Path) -> None:
    for path in lerobot.glob("policy_*"):
        path.unlink()
    weights = load_file(lerobot / "model.safetensors")
    weights["normalize_inputs.buffer_observation_state.mean"] = torch.zeros(STATE)
    save_file(weights, lerobot / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"normalize_inputs\.buffer_.*migrate_policy_normalization"):
        open_checkpoint(lerobot)


@pytest.mark.parametrize("text", ["{", "[1]", "version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_config(lerobot: Path, text: str) -> None:
    (lerobot / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is (not valid JSON|not a JSON object|a Git LFS pointer)"):
        open_checkpoint(lerobot)


def test_tokenizer_files(openpi: Path) -> None:
    assert open_checkpoint(openpi).tokenizer is None
    (openpi / "vocabulary.model").write_bytes(b"x")
    assert open_checkpoint(openpi).tokenizer == openpi / "vocabulary.model"
    (openpi / "another.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"several tokenizers \(another\.model, vocabulary\.model\): keep one"):
        open_checkpoint(openpi)
    (openpi / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is a Git LFS pointer"):
        open_checkpoint(openpi)


def test_path_that_is_not_a_directory(openpi: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"is a file: pass the checkpoint directory, {openpi}"):
        open_checkpoint(openpi / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"there is no directory .*: download the checkpoint first"):
        open_checkpoint(tmp_path / "owner" / "name")
    with pytest.raises(CheckpointError, match=r"there is no directory owner/name: .*hf download owner/name"):
        open_checkpoint("owner/name")


def test_weights_one_directory_below(lerobot: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match=r"holds no weights \(it holds: nothing\); download or export"):
        open_checkpoint(run)
    lerobot.rename(run / "pretrained_model")
    with pytest.raises(CheckpointError, match=f"holds no weights .*pass {run / 'pretrained_model'} instead"):
        open_checkpoint(run)


def test_weights_several_directories_below(lerobot: Path, tmp_path: Path) -> None:
    cache, run = tmp_path / "models--lab--policy", tmp_path / "run"
    snapshot = Path(shutil.copytree(lerobot, cache / "snapshots" / "0a1b"))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0a1b")
    trained = Path(shutil.copytree(lerobot, run / "checkpoints" / "005000" / "pretrained_model"))
    (run / "checkpoints" / "last").symlink_to("005000")
    for above, place in ((cache, snapshot), (run, run / "checkpoints" / "last" / trained.name)):
        with pytest.raises(CheckpointError, match=f"holds no weights .*pass {place} instead"):
            open_checkpoint(above)
    (cache / "last").symlink_to(".")  # a way that leads nowhere ends
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(cache)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_links_of_a_cache_that_was_emptied(lerobot: Path, name: str) -> None:
    (lerobot / name).unlink(missing_ok=True)
    (lerobot / name).symlink_to("../../blobs/0a1b")
    with pytest.raises(CheckpointError, match=f"links to files that are not there: {name}; .*download it again"):
        open_checkpoint(lerobot)


def test_lerobot_directory_without_its_config(lerobot: Path) -> None:
    (lerobot / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json, which says what these weights are: copy it there"):
        open_checkpoint(lerobot)


def test_training_directory_with_steps(openpi: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("900", "1000"):
        shutil.copytree(openpi, run / step)
    (run / "1100.orbax-checkpoint-tmp-1").mkdir()
    with pytest.raises(CheckpointError, match=f"holds no weights .*pass {run / '1000'} instead"):
        open_checkpoint(run)


def test_unfinished_orbax_save(openpi: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "100.orbax-checkpoint-tmp-0"
    shutil.copytree(openpi, unfinished)
    for path in (unfinished, unfinished / "assets"):
        with pytest.raises(CheckpointError, match=r"save did not finish \(100\.orbax-checkpoint-tmp-0 is a temporary"):
            open_checkpoint(path)
    step = tmp_path / "step"
    (step / "params.orbax-checkpoint-tmp-3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"still holds params\.orbax-checkpoint-tmp-3"):
        open_checkpoint(step)


def test_use_peft_in_the_config_decides_nothing(lerobot: Path) -> None:
    config = {"type": "pi05", "use_peft": True}
    write_json(lerobot / "config.json", config)
    checkpoint = open_checkpoint(lerobot)
    assert checkpoint.adapter is None
    assert "use_peft" in checkpoint.notes[0]
    (lerobot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(lerobot)


def test_adapter_without_its_base(lerobot: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "lab/base"})
    with pytest.raises(CheckpointError, match=r"only an adapter for the base 'lab/base'.*pass the base's directory"):
        open_checkpoint(adapter)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        open_checkpoint(lerobot, adapter=lerobot)
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors: copy it there, or remove"):
        open_checkpoint(lerobot, adapter=adapter)
    shutil.copy(adapter / "adapter_config.json", lerobot)
    with pytest.raises(CheckpointError, match="holds an adapter too"):
        open_checkpoint(lerobot, adapter=adapter)


def test_json_reader_is_strict_about_what_is_missing(lerobot: Path) -> None:
    (lerobot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match="two sets of weights"):
        open_checkpoint(lerobot)
