"""Everything that can be read from a checkpoint is read; what contradicts is named before weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from innerloop.blocks import flow_config, sizes
from innerloop.contract import CheckpointError
from innerloop.policies import FAMILIES, detect
from innerloop.weights import open_checkpoint

TINY = Path(__file__).resolve().parents[3] / "examples" / "checkpoints" / "tiny-pi05"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return loaded


def test_published_sizes_without_an_extension(config: dict[str, Any]) -> None:
    del config["innerloop_architecture"]
    read = flow_config.read_lerobot(config)
    assert (read.language.width, read.language.depth, read.language.mlp_dim) == (2048, 18, 16384)
    assert (read.expert.width, read.expert.mlp_dim, read.vision.layers) == (1024, 4096, 27)
    assert read.language.vocab_size == 257152


def test_full_size_parameter_count() -> None:
    """models' exact counts: 4,143,404,816 for pi0.5 less what a decision never reads."""
    import torch

    family = FAMILIES["pi05"]
    with torch.device("meta"):
        model = family.model(flow_config.default("pi05", 2, 50, 10, 200))
    total = sum(p.numel() for p in model.parameters())
    heads = 526_647_296 + 263_323_648  # two language heads
    width, mlp = 2048, 16384
    last_layer = 2 * width * 2048 + 3 * width * mlp + width  # q, o, MLP and one norm of the last prefix layer
    assert total == 4_143_404_816 - heads - last_layer - width  # and the final prefix norm


def test_cameras_keep_their_order_and_empty_ones_are_added(config: dict[str, Any]) -> None:
    config["empty_cameras"] = 1
    assert flow_config.read_lerobot(config).cameras == ("base", "wrist", "empty_camera_0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_size": None}, "chunk_size"),
        ({"chunk_size": -3}, "chunk_size is -3"),
        ({"num_inference_steps": "ten"}, "num_inference_steps"),
        ({"image_resolution": [224, 256]}, "square"),
        ({"input_features": {}}, "no camera"),
    ],
)
def test_bad_fields_are_named(config: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        flow_config.read_lerobot({**config, **change})


def test_unknown_variant_points_to_the_extension(config: dict[str, Any]) -> None:
    del config["innerloop_architecture"]
    with pytest.raises(CheckpointError, match="gemma_9b.*innerloop_architecture"):
        flow_config.read_lerobot({**config, "paligemma_variant": "gemma_9b"})


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("language", {"heads": 0}, "positive whole numbers"),
        ("language", {"colour": 3}, "unknown keys.*colour"),
        ("expert", {"head_dim": 32}, "must agree"),
        ("expert", {"depth": 3}, "must agree"),
        ("vision", {"heads": 7}, "not a multiple"),
    ],
)
def test_bad_extensions_are_named(config: dict[str, Any], section: str, change: dict[str, Any], words: str) -> None:
    own = config["innerloop_architecture"]
    own[section] = {**own[section], **change}
    with pytest.raises(CheckpointError, match=words):
        flow_config.read_lerobot(config)


def test_missing_section_and_missing_size(config: dict[str, Any]) -> None:
    own = config["innerloop_architecture"]
    del own["expert"]["width"]
    with pytest.raises(CheckpointError, match=r"missing keys \['width'\]"):
        flow_config.read_lerobot(config)
    del own["expert"]
    with pytest.raises(CheckpointError, match=r"no \'innerloop_architecture\.expert\'"):
        flow_config.read_lerobot(config)


def test_openpi_horizon_is_asked_for_and_must_not_contradict() -> None:
    with pytest.raises(CheckpointError, match="horizon="):
        flow_config.read_openpi({}, "pi05", None)
    with pytest.raises(CheckpointError, match="horizon=10.*action_horizon=15"):
        flow_config.read_openpi({"action_horizon": 15}, "pi05", 10)
    read = flow_config.read_openpi({"action_horizon": 15}, "pi05", None)
    assert (read.chunk, read.prompt_capacity, read.cameras) == (15, 200, flow_config.OPENPI_CAMERAS)


def test_family_is_read_from_the_tensors_and_must_agree_with_the_config(tmp_path: Path, config: dict[str, Any]) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert detect(open_checkpoint(tmp_path)).name == "pi05"
    (tmp_path / "config.json").write_text(json.dumps({**config, "type": "pi0"}))
    with pytest.raises(CheckpointError, match="type 'pi0'.*those of 'pi05'"):
        detect(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "type": "smolvla"}))
    with pytest.raises(CheckpointError, match="smolvla.*not supported.*pi05"):
        detect(open_checkpoint(tmp_path))


def test_tokens_per_image() -> None:
    assert sizes.VisionSizes(**sizes.SO400M, image_size=224).tokens == 256
