"""openpi's JAX checkpoints against what openpi's own converter and LoRA layers make of the same trees."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from innerloop.contract.errors import CheckpointError
from innerloop.weights import open_checkpoint
from innerloop.weights.orbax import OrbaxSource

GOLDEN = Path(__file__).parents[2] / "golden" / "orbax"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model.layers.1"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A pi0.5 step directory that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "pi05", tmp_path / "pi05"))


@pytest.mark.parametrize(("family", "dtype"), [("pi05", torch.float32), ("pi0", torch.bfloat16)])
@pytest.mark.parametrize("inside", ["", "params"])
def test_tensors_equal_those_of_the_official_converter(family: str, dtype: torch.dtype, inside: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / family / inside)
    expected = load_file(GOLDEN / f"{family}.safetensors")
    assert checkpoint.layout == "orbax"
    assert sorted(checkpoint.tensors.names()) == sorted(expected)
    for name, tensor in expected.items():
        read = checkpoint.tensors.read(name)
        assert checkpoint.tensors.info(name) == (tuple(tensor.shape), dtype, tensor.numel() * dtype.itemsize)
        assert read.dtype is dtype
        assert torch.equal(read.float(), tensor), name


def test_each_stored_array_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = OrbaxSource(GOLDEN / "pi05" / "params")
    reads: list[str] = []
    original = source._read

    def counted(key: str, layer: int | None) -> torch.Tensor:
        reads.append(key)
        return original(key, layer)

    monkeypatch.setattr(source, "_read", counted)
    for name in source.names():
        source.read(name)
    assert len(reads) == len(set(reads)) == len(source._arrays)
    assert source._held is None, "nothing stays in host memory"


def test_merged_attention_equals_the_official_lora_layers() -> None:
    golden = np.load(GOLDEN / "lora.npz")
    tensors = open_checkpoint(GOLDEN / "lora").tensors
    read = {name: torch.from_numpy(golden[name]) for name in golden.files}

    def weight(name: str) -> torch.Tensor:
        return tensors.read(f"{LANGUAGE}.self_attn.{name}_proj.weight")

    query = read["q_einsum.x"] @ weight("q").T
    torch.testing.assert_close(query, read["q_einsum.y"].flatten(2), rtol=1e-5, atol=1e-5)
    for index, name in enumerate("kv"):
        projected = read["kv_einsum.x"] @ weight(name).T
        torch.testing.assert_close(projected, read["kv_einsum.y"][index].flatten(2), rtol=1e-5, atol=1e-5)
    out = read["attn_vec_einsum.x"].flatten(2) @ weight("o").T
    torch.testing.assert_close(out, read["attn_vec_einsum.y"], rtol=1e-5, atol=1e-4)


def test_merged_mlp_equals_the_official_lora_layer() -> None:
    golden = np.load(GOLDEN / "lora.npz")
    tensors = open_checkpoint(GOLDEN / "lora").tensors
    gate, up, down = (tensors.read(f"{LANGUAGE}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    x = torch.from_numpy(golden["mlp.x"])
    y = (F.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)) @ down.T
    torch.testing.assert_close(y, torch.from_numpy(golden["mlp.y"]), rtol=1e-5, atol=1e-3)


def test_lora_parameters_are_merged_and_named_nowhere_else() -> None:
    plain, adapted = (open_checkpoint(GOLDEN / name).tensors for name in ("pi05", "lora"))
    assert sorted(plain.names()) == sorted(adapted.names())
    assert adapted.merged[f"{LANGUAGE}.mlp.up_proj.weight"] == "rank 3 x 1"
    assert len(adapted.merged) == 2 * 2 * 7
    assert not plain.merged


def test_the_digest_sees_base_and_adapter_as_stored() -> None:
    tensors = open_checkpoint(GOLDEN / "lora").tensors
    seen: dict[str, torch.Tensor] = {}
    name = f"{LANGUAGE}.self_attn.q_proj.weight"
    merged = tensors.read(name, seen.__setitem__)
    assert sorted(seen) == sorted([name, f"adapter:{name}.lora_a", f"adapter:{name}.lora_b"])
    assert not torch.equal(merged, seen[name])


def test_array_listed_but_not_stored(copy: Path) -> None:
    metadata = copy / "params" / "_METADATA"
    content = json.loads(metadata.read_text())
    stray = {"key_metadata": [{"key": "params"}, {"key": "stray"}]}
    content["tree_metadata"]["stray"] = stray
    metadata.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'params\.stray' is listed but not stored"):
        open_checkpoint(copy)


def test_several_statistics_sets_beside_params(copy: Path) -> None:
    stats = json.dumps({"norm_stats": {"state": {"mean": [0.0], "std": [1.0]}}})
    for name in ("a", "b"):
        (copy / "assets" / name).mkdir(parents=True)
        (copy / "assets" / name / "norm_stats.json").write_text(stats)
    for place in (copy, copy / "params"):
        with pytest.raises(CheckpointError, match=r"2 sets of statistics \(a, b\)"):
            open_checkpoint(place)
        assert open_checkpoint(place, assets="b").assets == "b"


def test_metadata_that_was_never_written(copy: Path) -> None:
    (copy / "params" / "_METADATA").write_text('{"tree_metadata": {}}')
    with pytest.raises(CheckpointError, match="lists no arrays: the save did not finish"):
        open_checkpoint(copy)


def data_files(copy: Path) -> list[Path]:
    """Where the arrays' bytes are."""
    return [p for p in copy.rglob("*") if p.parent.name == "d" and p.parent.parent.name == "ocdbt.process_0"]


def test_data_file_lost_in_a_copy(copy: Path) -> None:
    lost = max(data_files(copy), key=lambda path: path.stat().st_size)
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} does not exist: the copy is incomplete"):
        open_checkpoint(copy)


def test_data_file_truncated_in_a_copy(copy: Path) -> None:
    cut = max(data_files(copy), key=lambda path: path.stat().st_size)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=f"{cut.name} is truncated"):
        open_checkpoint(copy)


def test_index_of_the_arrays_damaged(copy: Path) -> None:
    (copy / "params" / "manifest.ocdbt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="index of the stored arrays cannot be read"):
        open_checkpoint(copy)


def test_array_damaged_where_only_reading_shows_it(copy: Path) -> None:
    for path in data_files(copy):
        path.write_bytes(bytes(path.stat().st_size))
    tensors = open_checkpoint(copy).tensors
    with pytest.raises(CheckpointError, match=r"cannot be read .* download the checkpoint again"):
        [tensors.read(name) for name in tensors.names()]


def test_without_tensorstore(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    with pytest.raises(CheckpointError, match=r"pip install 'innerloop\[orbax\]'"):
        open_checkpoint(copy)
