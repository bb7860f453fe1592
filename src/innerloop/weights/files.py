"""Which files of a directory hold the weights: one file, shards with an index, or shards that count themselves."""

import re
from pathlib import Path

from innerloop.contract.errors import CheckpointError
from innerloop.weights.source import Shards, TensorSource, open_tensor_file, read_json

_SINGLE = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.pt")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_COUNTED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)$")


def open_weight_files(directory: Path) -> TensorSource | None:
    """The tensors of a directory, or None when it has no weight file. Reads headers only."""
    index = next((directory / name for name in _INDEX if (directory / name).is_file()), None)
    single = next((directory / name for name in _SINGLE if (directory / name).is_file()), None)
    if index is not None and single is not None and index.name.startswith(single.name):
        raise CheckpointError(
            f"{directory} holds two sets of weights, {single.name} and the shards of {index.name}: "
            "one of them is stale, remove it"
        )
    if single is not None and (index is None or single.suffix == ".safetensors"):
        return open_tensor_file(single)
    if index is not None:
        return _indexed(index)
    return _counted(directory)


def _indexed(index: Path) -> TensorSource:
    content = read_json(index)
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no weight_map: export the checkpoint again")
    names = sorted(set(table.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard '{name}', which lies outside its directory")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index.parent}: {len(absent)} of {len(names)} shards in {index.name} do not exist: "
            f"{', '.join(absent)}; download them"
        )
    return Shards([open_tensor_file(index.parent / name) for name in names], table)


def _counted(directory: Path) -> TensorSource | None:
    found: dict[tuple[str, str, str], dict[int, Path]] = {}
    for path in sorted(directory.iterdir()):
        match = _COUNTED.fullmatch(path.name)
        if match:
            stem, number, total, suffix = match.groups()
            found.setdefault((stem, total, suffix), {})[int(number)] = path
    if not found:
        return None
    if len(found) > 1:
        sets = ", ".join(f"{stem}-*-of-{total}.{suffix}" for stem, total, suffix in found)
        raise CheckpointError(f"{directory} holds several sets of shards without an index ({sets}): keep one")
    ((stem, total, suffix), shards) = next(iter(found.items()))
    absent = [f"{stem}-{n:05d}-of-{total}.{suffix}" for n in range(1, int(total) + 1) if n not in shards]
    if absent:
        raise CheckpointError(f"{directory}: shards do not exist: {', '.join(absent)}; download them")
    return Shards([open_tensor_file(path) for path in shards.values()])
