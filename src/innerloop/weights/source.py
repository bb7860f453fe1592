"""Named tensors in files: sizes are known and checked from the headers, bytes are read one tensor at a time."""

import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol

import torch

from innerloop.contract.errors import CheckpointError

Seen = Callable[[str, torch.Tensor], None]

# https://huggingface.co/docs/safetensors (format) and https://git-lfs.com (pointer specification)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LFS = b"version https://git-lfs.github.com/spec/"


class TensorInfo(NamedTuple):
    """What a header says about one tensor; bytes as stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class TensorSource(Protocol):
    """Named tensors that can be sized without being read. Files are never written."""

    @property
    def merged(self) -> Mapping[str, str]:
        """Tensor name -> what an adapter does to it; empty without one."""
        ...

    def names(self) -> tuple[str, ...]:
        """Every tensor, in the order in which reading is cheapest."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and size of one tensor, without reading it."""
        ...

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """One CPU tensor. `seen` gets every stored tensor that this took, under its stored name, for the digest."""
        ...


def check_not_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer that stands where the real file should be."""
    with path.open("rb") as file:
        start = file.read(len(_LFS))
    if start == _LFS:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there or download the file again"
        )


def read_json(path: Path) -> Any:
    """The content of a JSON file; CheckpointError when it is absent, a pointer, or not JSON."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: download or export the checkpoint again, completely")
    check_not_pointer(path)
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download or export it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object; CheckpointError as `read_json`, and for anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download or export it again")
    return content


class SafetensorsFile:
    """One .safetensors file. The header is checked against the file's size when it is opened."""

    merged: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        check_not_pointer(path)
        self._state = _state(path)
        size = self._state[0]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is truncated inside its header ({size} bytes): download or export it again"
                )
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise CheckpointError(f"{path} is not a safetensors file (unreadable header): {error}") from error
        self._start = 8 + length
        entries = _entries(header, path)
        self._entries = {name: self._entry(name, entry) for name, entry in entries}
        self._check_extent(size - self._start)

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""
        return tuple(self._entries)

    def info(self, name: str) -> TensorInfo:
        """From the header."""
        return self._entries[name][1]

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """A private mapping of the tensor's bytes: writing to it never reaches the file."""
        if _state(self.path) != self._state:
            # A mapping of a file that has become shorter would end the process.
            raise CheckpointError(f"{self.path} changed after it was opened: load again when it is complete")
        begin, info = self._entries[name]
        tensor = self._map(self._start + begin, info)
        if seen is not None:
            seen(name, tensor)
        return tensor

    def _map(self, start: int, info: TensorInfo) -> torch.Tensor:
        if info.bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        aligned = start - start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            view = mmap.mmap(file.fileno(), start - aligned + info.bytes, access=mmap.ACCESS_COPY, offset=aligned)
        raw = torch.frombuffer(view, dtype=torch.uint8, count=info.bytes, offset=start - aligned)
        if start % info.dtype.itemsize:
            raw = raw.clone()
        return raw.view(info.dtype).reshape(info.shape)

    def _entry(self, name: str, entry: Mapping[str, Any]) -> tuple[int, TensorInfo]:
        dtype = _DTYPES.get(str(entry["dtype"]))
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' has dtype {entry['dtype']}, which cannot be read; "
                f"store it as one of {', '.join(_DTYPES)}"
            )
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        size = math.prod(shape) * dtype.itemsize
        if end - begin != size:
            raise CheckpointError(
                f"{self.path}: the header gives tensor '{name}' {end - begin} bytes, but {list(shape)} of "
                f"{entry['dtype']} needs {size}: export the checkpoint again"
            )
        return begin, TensorInfo(shape, dtype, size)

    def _check_extent(self, size: int) -> None:
        position = 0
        for name, (begin, info) in self._entries.items():
            if begin != position:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' starts at byte {begin} of the data, not {position}: "
                    "the header is damaged, export the checkpoint again"
                )
            position += info.bytes
        if position != size:
            state = "truncated" if size < position else "longer than its header says"
            raise CheckpointError(
                f"{self.path} is {state}: its header needs {position} data bytes, the file has {size}; "
                "download or export it again"
            )


class TorchFile:
    """One .pt or .bin state dict, opened by torch's weights-only reader: nothing in it is executed."""

    merged: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        check_not_pointer(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (UnpicklingError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{path} holds something other than tensors ({_first_line(error)}); nothing in it was executed. "
                "Save its state dict as safetensors where you trust it"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a torch checkpoint in zip format ({_first_line(error)}): "
                "download it again, or save it as safetensors"
            ) from error
        self._tensors = _state_dict(loaded, path)

    def names(self) -> tuple[str, ...]:
        """Keys of the state dict."""
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """From the mapped tensor."""
        tensor = self._tensors[name]
        return TensorInfo(tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.itemsize)

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """The memory-mapped tensor."""
        tensor = self._tensors[name].detach()
        if seen is not None:
            seen(name, tensor)
        return tensor


class Shards:
    """Several files as one source; one name in two files is an error that says which is stale."""

    merged: Mapping[str, str] = {}

    def __init__(self, files: Sequence["SafetensorsFile | TorchFile"], index: Mapping[str, str] | None = None) -> None:
        self._home: dict[str, SafetensorsFile | TorchFile] = {}
        problems = []
        for file in files:
            for name in file.names():
                wanted = file.path.name if index is None else index.get(name)
                if wanted is None:
                    problems.append(f"tensor '{name}' is in {file.path.name} but not in the index")
                elif wanted != file.path.name:
                    problems.append(f"the index places tensor '{name}' in {wanted}, but {file.path.name} holds one too")
                elif name in self._home:
                    other = self._home[name].path.name
                    problems.append(f"tensor '{name}' is in both {other} and {file.path.name}")
                else:
                    self._home[name] = file
        absent = [(name, file) for name, file in (index or {}).items() if name not in self._home]
        problems += [f"tensor '{name}' is in the index but not in {file}" for name, file in absent]
        if problems:
            raise CheckpointError(
                f"{files[0].path.parent}: shards and index disagree, a file is stale or incomplete; "
                "download or export the checkpoint again:\n  " + "\n  ".join(problems)
            )

    def names(self) -> tuple[str, ...]:
        """Tensor names, shard after shard."""
        return tuple(self._home)

    def info(self, name: str) -> TensorInfo:
        """From the shard's header."""
        return self._home[name].info(name)

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """From the shard that holds it."""
        return self._home[name].read(name, seen)


def open_tensor_file(path: Path) -> SafetensorsFile | TorchFile:
    """One weight file by its suffix."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _entries(header: object, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """A header's tensors in file order. Raises CheckpointError unless each has dtype, shape and both ends."""
    found = [] if not isinstance(header, dict) else [item for item in header.items() if item[0] != "__metadata__"]
    odd = next((name for name, entry in found if not _is_entry(entry)), None)
    if odd is not None or not isinstance(header, dict):
        what = "not an object" if odd is None else f"damaged at tensor '{odd}'"
        raise CheckpointError(f"{path}: the header is {what}: download or export it again")
    return sorted(found, key=lambda item: item[1]["data_offsets"])


def _is_entry(entry: object) -> bool:
    def sizes(value: object) -> bool:
        return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)

    if not isinstance(entry, dict) or not sizes(entry.get("shape")) or not sizes(entry.get("data_offsets")):
        return False
    return "dtype" in entry and len(entry["data_offsets"]) == 2


def _state_dict(loaded: object, path: Path) -> dict[str, torch.Tensor]:
    candidates = [loaded]
    if isinstance(loaded, Mapping):
        candidates += [loaded[key] for key in ("state_dict", "model", "module") if key in loaded]
    for candidate in candidates:
        if not isinstance(candidate, Mapping) or not candidate:
            continue
        if all(isinstance(value, torch.Tensor) for value in candidate.values()):
            return {str(name): tensor for name, tensor in candidate.items()}
    raise CheckpointError(f"{path} holds no state dict (names to tensors): save `model.state_dict()` as safetensors")


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
