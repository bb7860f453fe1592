"""Whatever the configuration files of a directory hold in any one place, it loads or is refused in our own words."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_policies import CHECKPOINTS
from safetensors.numpy import save_file

from innerloop import levels
from innerloop.blocks import flow_config
from innerloop.contract import CheckpointError, InnerloopError
from innerloop.engine.assembly import outline
from innerloop.policies import detect
from innerloop.process import Edge
from innerloop.weights import open_checkpoint
from recipes.tiny import groot, qwen, starvla

ODD = (None, "x", -1, 0, 1.5, True, [], {"a": 1})


def variants(content: Any) -> Iterator[Any]:
    """The content with one place made odd, or left out; of a list of numbers only the first."""
    yield from ODD
    if not isinstance(content, dict | list):
        return
    for key in places(content):
        for odd in variants(content[key]):
            changed = content.copy()
            changed[key] = odd
            yield changed
        changed = content.copy()
        del changed[key]
        yield changed


def places(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return list(content)
    return list(range(len(content)))[: 1 if all(isinstance(item, int | float) for item in content) else None]


def refusals(file: Path, opened: Callable[[], object]) -> int:
    """How many variants of a file are refused; every other error, and every warning, ends the test."""
    refused = 0
    for content in variants(json.loads(file.read_text())):
        file.write_text(json.dumps(content))
        try:
            opened()
        except InnerloopError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{file.name}: {json.dumps(content)}") from error
    return refused


def outlined(directory: Path, assets: str | None = None) -> None:
    """All that a load does before weights are read."""
    checkpoint = open_checkpoint(directory, assets=assets)
    family = detect(checkpoint)
    config = family.config(checkpoint, None)
    family.processor(config, checkpoint, Edge())
    model = outline(family, config, checkpoint.tensors)
    family.plans(model, 1, next(model.parameters()).dtype, "")


PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")


@pytest.mark.parametrize(
    ("family", "name"), [*((f, "config.json") for f in CHECKPOINTS), *(("pi05", p) for p in PROCESSORS)]
)
def test_lerobot(tmp_path: Path, family: str, name: str) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS[family], tmp_path / "c"))
    assert refusals(directory / name, lambda: outlined(directory)) > 20


@pytest.mark.parametrize(
    "name", ["config.json", "processor_config.json", "embodiment_id.json", "preprocessor_config.json"]
)
def test_groot(tmp_path: Path, name: str) -> None:
    directory = groot.write(tmp_path)
    assert refusals(directory / name, lambda: outlined(directory, groot.DROID)) > 10


@pytest.mark.parametrize(
    ("raw", "name"), [(False, "config.json"), (True, PROCESSORS[1]), *((raw, PROCESSORS[0]) for raw in (True, False))]
)
def test_lerobot_groot(tmp_path: Path, raw: bool, name: str) -> None:
    directory = lerobot_groot(tmp_path, raw)
    outlined(directory)
    assert refusals(directory / name, lambda: outlined(directory)) > 10


def lerobot_groot(directory: Path, raw: bool) -> Path:
    """The tiny GR00T as LeRobot 0.6.1 saves it; raw: with Isaac-GR00T's own statistics, else with flat ones as tensors."""
    stated, kwargs = groot.config(), groot.processor_config()["processor_kwargs"]
    modality = kwargs.pop("modality_configs")[groot.LIBERO]
    groot.write(directory)
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        (directory / name).unlink()
    own = {**stated, **stated.pop("innerloop_architecture")}
    features = {f"observation.images.{name}": {"type": "VISUAL"} for name in modality["video"]["modality_keys"]}
    pack = {"embodiment_tag": groot.LIBERO, "embodiment_mapping": groot.IDS}
    step: dict[str, Any] = {"registry_name": "groot_n1_7_pack_inputs_v1", "config": pack}
    if raw:
        pack |= {"raw_stats": groot.statistics()[groot.LIBERO], "modality_config": modality}
    else:
        pack |= {"valid_action_horizon": 6, "video_horizon": 1}
        rows = {"min": -np.ones(7, np.float32), "max": np.ones(7, np.float32)}
        stats = {f"{kind}.{name}": row for kind in ("observation.state", "action") for name, row in rows.items()}
        save_file(stats, directory / "stats.safetensors")
        step["state_file"] = "stats.safetensors"
    encode = {"registry_name": "groot_n1_7_vlm_encode_v1", "config": kwargs}
    decode = {"registry_name": "groot_n1_7_action_decode_v1", "config": {"use_percentiles": raw}}
    for name, content in (
        ("config.json", {"type": "groot", "input_features": features, "innerloop_architecture": own}),
        ("policy_preprocessor.json", {"steps": [step, encode]}),
        ("policy_postprocessor.json", {"steps": [decode]}),
    ):
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *((name, "config.yaml") for name in sorted(starvla.RUNS)),
        ("pi3", "dataset_statistics.json"),
        ("pi3", f"{starvla.VLM}/config.json"),
        ("fast", "fast/processor_config.json"),
    ],
)
def test_starvla(tmp_path: Path, name: str, file: str) -> None:
    directory = starvla.write(tmp_path, starvla.RUNS[name])
    assert refusals(directory / file, lambda: outlined(directory)) > 10


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_levels(tmp_path: Path, kind: str, file: str) -> None:
    directory = qwen.write(tmp_path, kind, 3)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert refusals(directory / file, lambda: levels.load_level(directory, device="cpu")) > 10


@pytest.mark.parametrize(
    ("horizon", "change", "words"),
    [
        (None, {"action_horizon": True}, "action_horizon is True; it must be a positive whole number"),
        (10, {"action_dim": 0}, "action_dim is 0"),
        (10, {"image_resolution": [224, "x"]}, "image_resolution is .*; it must be a list of 2 whole numbers"),
        (10, {"paligemma_variant": ["gemma_2b"]}, "paligemma_variant is .*; it must be a string"),
        (10, {"innerloop_architecture": [1]}, "innerloop_architecture is .*; it must be a section"),
    ],
)
def test_openpi(horizon: int | None, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {words}"):
        flow_config.read_openpi(change, "pi05", horizon)


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("text_config", {"hidden_size": "64"}, r"text_config\.hidden_size is '64'; it must be a positive whole number"),
        ("text_config", {"rms_norm_eps": 0}, r"text_config\.rms_norm_eps is 0; it must be a positive number"),
        (
            "text_config",
            {"rope_scaling": {"mrope_section": 8}},
            r"rope_scaling\.mrope_section is 8; .* 3 whole numbers",
        ),
        ("vision_config", {"num_heads": 5}, r"num_heads is 5; .* a multiple of 4 of the 48"),
        ("vision_config", {"deepstack_visual_indexes": [1, 4]}, r"indexes is \[1, 4\]; .* different layers of 4"),
        ("vision_config", {"depth": None}, r"has no 'vision_config\.depth', a positive whole number"),
    ],
)
def test_file_place_and_remedy_are_named(tmp_path: Path, section: str, change: dict[str, Any], words: str) -> None:
    path = qwen.write(tmp_path, "qwen3_vl", 3) / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, section: {**content[section], **change}}))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}.*{words}"):
        levels.load_level(tmp_path, device="cpu")
