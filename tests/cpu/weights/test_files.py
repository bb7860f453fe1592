"""Single files and shards: exact values, and every kind of damage refused from the header alone."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from innerloop.contract.errors import CheckpointError
from innerloop.weights.files import open_weight_files
from innerloop.weights.source import SafetensorsFile, TorchFile

FIRST, SECOND, THIRD = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards and their index."""
    for number, name in enumerate((FIRST, SECOND, THIRD)):
        save_file({f"t{number}": torch.full((2, 2), float(number))}, tmp_path / name)
    index = {"metadata": {}, "weight_map": {"t0": FIRST, "t1": SECOND, "t2": THIRD}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def remap(directory: Path, **names: str) -> None:
    """Change the index."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(names)
    path.write_text(json.dumps(index))


def raw(path: Path, header: dict[str, object], data: bytes) -> Path:
    """A safetensors file byte by byte."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool],
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randn(5, 7).mul(3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 4).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_weight_files(tmp_path)
    assert source is not None
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        read = source.read(name)
        assert source.info(name) == (tuple(tensor.shape), dtype, tensor.numel() * tensor.itemsize)
        assert read.dtype is dtype
        assert torch.equal(read, tensor)


def test_writing_to_a_read_tensor_never_reaches_the_file(tmp_path: Path, unchanged: Callable[[], None]) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    unchanged()
    source = SafetensorsFile(tmp_path / "model.safetensors")
    source.read("a").fill_(7)
    assert torch.equal(source.read("a"), torch.ones(1000))


def test_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10_000)}, path)
    source = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="changed after it was opened"):
        source.read("a")


def test_tensors_at_odd_offsets(tmp_path: Path) -> None:
    header = {
        "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "value": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    path = raw(tmp_path / "model.safetensors", header, b"\x01" + struct.pack("<2f", 1.5, -2.0))
    assert SafetensorsFile(path).read("value").tolist() == [1.5, -2.0]


def test_headers_are_enough_for_a_file_larger_than_memory(tmp_path: Path) -> None:
    size = 1 << 40
    header = {"huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path = raw(tmp_path / "model.safetensors", header, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    source = open_weight_files(tmp_path)
    assert source is not None
    assert source.info("huge").bytes == size


@pytest.mark.parametrize("cut", [1, 100, 5, 0])
def test_truncated_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    data = path.read_bytes()
    path.write_bytes({1: data[:-1], 100: data[:100], 5: data[:5], 0: b""}[cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated.*download or export it again"):
        open_weight_files(tmp_path)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        open_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"tensor 'a' 8 bytes, but \[3\] of F32 needs 12"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "starts at byte 4"),
        (
            {"dtype": "F6_E2M3", "shape": [2], "data_offsets": [0, 8]},
            "dtype F6_E2M3, which cannot be read; store it as",
        ),
    ],
)
def test_header_that_contradicts_itself(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    raw(tmp_path / "model.safetensors", {"a": entry}, bytes(12))
    with pytest.raises(CheckpointError, match=message):
        open_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "header is not an object"),
        ({"a": 3}, "damaged at tensor 'a'"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "damaged at tensor 'a'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "damaged at tensor 'a'"),
        ({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, "damaged at tensor 'a'"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "cannot be read"),
    ],
)
def test_header_that_is_none(tmp_path: Path, header: Any, message: str) -> None:
    raw(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(CheckpointError, match=message):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        open_weight_files(tmp_path)


def test_not_a_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{" + bytes(8))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"state_dict": t, "step": 3}])
def test_torch_file(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16()}
    torch.save(wrap(tensors), tmp_path / "pytorch_model.bin")
    source = open_weight_files(tmp_path)
    assert source is not None
    assert source.names() == ("a", "b")
    assert source.info("b") == ((4,), torch.bfloat16, 8)
    assert torch.equal(source.read("a"), tensors["a"])


class Bomb:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_is_never_executed(tmp_path: Path, legacy: bool) -> None:
    fired, path = tmp_path / "fired", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": Bomb(fired)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="safetensors"):
        open_weight_files(tmp_path)
    path.write_bytes(pickle.dumps(Bomb(fired)))
    with pytest.raises(CheckpointError, match="safetensors"):
        open_weight_files(tmp_path)
    assert not fired.exists()


def test_truncated_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is truncated"):
        TorchFile(path)


def test_torch_file_without_a_state_dict(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        open_weight_files(tmp_path)


def test_shards_read_as_one(shards: Path) -> None:
    source = open_weight_files(shards)
    assert source is not None
    assert source.names() == ("t0", "t1", "t2")
    assert [source.read(name)[0, 0].item() for name in source.names()] == [0, 1, 2]


def test_missing_shard(shards: Path) -> None:
    (shards / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"1 of 3 shards .* do not exist: {SECOND}; download"):
        open_weight_files(shards)


def test_missing_shard_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    assert open_weight_files(shards) is not None
    (shards / THIRD).unlink()
    with pytest.raises(CheckpointError, match=f"do not exist: {THIRD}"):
        open_weight_files(shards)


def test_stale_duplicate_in_another_shard(shards: Path) -> None:
    save_file({"t2": torch.ones(2, 2), "t1": torch.zeros(2, 2)}, shards / THIRD)
    with pytest.raises(CheckpointError, match=rf"places tensor 't1' in {SECOND}, but {THIRD} holds one too"):
        open_weight_files(shards)


def test_duplicate_in_shards_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    save_file({"t1": torch.ones(2, 2)}, shards / THIRD)
    with pytest.raises(CheckpointError, match=f"tensor 't1' is in both {SECOND} and {THIRD}"):
        open_weight_files(shards)


def test_index_and_shards_disagree(shards: Path) -> None:
    remap(shards, ghost=FIRST)
    save_file({"t2": torch.ones(2, 2), "extra": torch.ones(1)}, shards / THIRD)
    with pytest.raises(CheckpointError) as error:
        open_weight_files(shards)
    assert f"'ghost' is in the index but not in {FIRST}" in str(error.value)
    assert f"'extra' is in {THIRD} but not in the index" in str(error.value)


def test_shard_outside_the_directory(shards: Path) -> None:
    remap(shards, t2="../secret.safetensors")
    with pytest.raises(CheckpointError, match="outside its directory"):
        open_weight_files(shards)


def test_empty_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_weight_files(shards)


def test_two_sets_of_weights(shards: Path) -> None:
    save_file({"t0": torch.ones(2, 2)}, shards / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two sets of weights.*remove it"):
        open_weight_files(shards)


def test_several_sets_of_shards(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    save_file({"t0": torch.ones(2, 2)}, shards / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="several sets of shards"):
        open_weight_files(shards)
