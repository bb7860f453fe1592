"""PEFT adapters: merged as PEFT merges them, and refused where they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from innerloop.contract.errors import CheckpointError
from innerloop.weights import NameTable, load_weights, open_checkpoint
from innerloop.weights.lora import LoraSource
from innerloop.weights.source import SafetensorsFile, TensorSource

GOLDEN = Path(__file__).parents[2] / "golden" / "adapters"


def merge(variant: str, adapter: Path | None = None) -> LoraSource:
    """A golden base with its adapter, or with a copy of it."""
    base = SafetensorsFile(GOLDEN / variant / "base.safetensors")
    return LoraSource(base, adapter or GOLDEN / variant / "adapter")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A copy of the plain adapter that a test may change."""
    return Path(shutil.copytree(GOLDEN / "plain" / "adapter", tmp_path / "adapter"))


def edit(directory: Path, **settings: object) -> Path:
    """Change adapter_config.json."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change adapter_model.safetensors."""
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("variant", ["plain", "rslora"])
def test_merged_as_peft_merges(variant: str) -> None:
    source = merge(variant)
    expected = load_file(GOLDEN / variant / "merged.safetensors")
    base = load_file(GOLDEN / variant / "base.safetensors")
    assert sorted(source.names()) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(source.read(name), tensor, rtol=1e-6, atol=1e-6)
        assert source.info(name)[:2] == (tuple(tensor.shape), torch.float32)
        assert torch.equal(tensor, base[name]) == (name not in source.merged), name


def test_account_says_ranks_and_scales() -> None:
    plain = merge("plain").merged
    assert plain["layers.0.q_proj.weight"] == "rank 2 x 3"
    assert plain["layers.0.k_proj.weight"] == "rank 3 x 2"
    assert plain["layers.1.k_proj.weight"] == "rank 3 x 1.66667"
    assert plain["head.weight"] == plain["head.bias"] == "replaced"
    assert merge("rslora").merged["layers.0.q_proj.weight"] == "rank 4 x 1.5"


def test_weights_stored_transposed(tmp_path: Path) -> None:
    base, down, up = torch.randn(6, 8), torch.randn(2, 6), torch.randn(8, 2)
    save_file({"c.weight": base}, tmp_path / "base.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"c.lora_A.weight": down, "c.lora_B.weight": up}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": True}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merged = LoraSource(SafetensorsFile(tmp_path / "base.safetensors"), adapter).read("c.weight")
    torch.testing.assert_close(merged, base + (up @ down).T)


def test_low_precision_weights_are_rounded_once(tmp_path: Path) -> None:
    base = {name: tensor.bfloat16() for name, tensor in load_file(GOLDEN / "rslora" / "base.safetensors").items()}
    save_file(base, tmp_path / "base.safetensors")
    source = LoraSource(SafetensorsFile(tmp_path / "base.safetensors"), GOLDEN / "rslora" / "adapter")
    name = "layers.1.q_proj.weight"
    parts = load_file(GOLDEN / "rslora" / "adapter" / "adapter_model.safetensors")
    down, up = (parts[f"base_model.model.layers.1.q_proj.lora_{side}.weight"] for side in "AB")
    assert source.read(name).dtype is source.info(name).dtype is torch.float32
    torch.testing.assert_close(source.read(name), base[name].float() + 1.5 * up @ down)


def test_digest_is_of_what_is_stored(adapter: Path) -> None:
    def digest(source: TensorSource) -> str:
        names = source.names()
        buffers = {name: torch.empty(source.info(name).shape) for name in names}
        return load_weights(buffers, source, NameTable({name: (name,) for name in names}, {}, (), ())).digest

    merged = digest(merge("plain"))
    assert merged == digest(merge("plain", adapter))
    assert merged != digest(SafetensorsFile(GOLDEN / "plain" / "base.safetensors"))
    rewrite(adapter, lambda t: t["base_model.model.layers.0.q_proj.lora_B.weight"].view(-1)[0].add_(1))
    assert merged != digest(merge("plain", adapter))


def test_unmatched_target(adapter: Path) -> None:
    for key in ("ghost.lora_A.weight", "ghost.lora_B.weight", "ghost.bias"):
        rewrite(adapter, lambda t, k=key: t.update({f"base_model.model.{k}": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError) as error:
        merge("plain", adapter)
    assert "may belong to another model" in str(error.value)
    assert "'ghost' matches no tensor of the base" in str(error.value)
    assert "'base_model.model.ghost.bias' matches no tensor of the base" in str(error.value)


def test_half_a_pair(adapter: Path) -> None:
    rewrite(adapter, lambda t: t.pop("base_model.model.layers.0.q_proj.lora_B.weight"))
    with pytest.raises(CheckpointError, match=r"'layers\.0\.q_proj' has lora_A only, its other half is missing"):
        merge("plain", adapter)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("layers.0.q_proj.lora_A.weight", (2, 5), r"'layers\.0\.q_proj\.weight' is \[8, 6\] in the base, but lora_A"),
        ("layers.0.q_proj.lora_B.weight", (8, 3), r"lora_B \[8, 3\]"),
        ("head.weight", (4, 8), r"'head\.weight' is \[3, 8\] in the base, \[4, 8\] in the adapter"),
    ],
)
def test_shapes_of_another_model(adapter: Path, key: str, shape: tuple[int, ...], message: str) -> None:
    rewrite(adapter, lambda t: t.update({f"base_model.model.{key}": torch.ones(shape)}))
    with pytest.raises(CheckpointError, match=message):
        merge("plain", adapter)


def test_rank_that_contradicts_the_config(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says rank 3 for 'layers\.0\.k_proj', its tensors have 3|says rank 9"):
        merge("plain", edit(adapter, rank_pattern={"k_proj": 9}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "type IA3, only LORA"),
        ({"use_dora": True, "lora_bias": True}, "sets use_dora, lora_bias, a variant of LoRA that is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "sets init_lora_weights=pissa_niter_4, a variant"),
    ],
)
def test_other_kinds_of_adapter(adapter: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        merge("plain", edit(adapter, **settings))


def test_empty_adapter(adapter: Path) -> None:
    rewrite(adapter, dict.clear)
    with pytest.raises(CheckpointError, match="it holds no tensors"):
        merge("plain", adapter)


def lora_for(lerobot: Path, adapter: Path, base: str) -> Path:
    """An adapter as LeRobot saves one: PEFT's two files beside config and processors."""
    adapter.mkdir()
    parts = {"lora_A.weight": torch.ones(1, 2), "lora_B.weight": torch.ones(3, 1)}
    tensors = {f"base_model.model.model.action_in_proj.{key}": tensor for key, tensor in parts.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    for path in lerobot.glob("policy_*"):
        shutil.copy(path, adapter)
    (adapter / "config.json").write_text(json.dumps({"type": "pi05", "use_peft": True, "chunk_size": 9}))
    (lerobot / "config.json").write_text(json.dumps({"type": "pi05", "chunk_size": 4, "sizes": 3}))
    return adapter


def test_adapter_beside_its_base(lerobot: Path, tmp_path: Path, unchanged: Callable[[], None]) -> None:
    adapter = lora_for(lerobot, tmp_path / "adapter", str(lerobot))
    unchanged()
    base = open_checkpoint(lerobot)
    name = "model.action_in_proj.weight"
    for checkpoint in (open_checkpoint(lerobot, adapter=adapter), open_checkpoint(adapter)):
        assert checkpoint.adapter == adapter
        assert checkpoint.adapter_config is not None
        assert checkpoint.adapter_config["lora_alpha"] == 2
        assert checkpoint.config == {"type": "pi05", "use_peft": True, "chunk_size": 9, "sizes": 3}
        assert torch.equal(checkpoint.tensors.read(name), base.tensors.read(name) + 2)
        assert checkpoint.tensors.merged == {name: "rank 1 x 2"}
        assert checkpoint.tokenizer == lerobot / "tokenizer.json"
        assert checkpoint.notes == ()


def test_base_and_adapter_in_one_directory(lerobot: Path, tmp_path: Path) -> None:
    adapter = lora_for(lerobot, tmp_path / "adapter", "unknown")
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, lerobot)
    assert open_checkpoint(lerobot).adapter == lerobot
