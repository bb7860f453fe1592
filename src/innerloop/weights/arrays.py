"""The arrays of an Orbax save, opened through TensorStore and checked for completeness, none of them read."""

import math
from pathlib import Path
from typing import Any

from innerloop.contract.errors import CheckpointError
from innerloop.weights.source import read_json


def open_arrays(directory: Path) -> dict[str, Any]:
    """Every array below `params`: key path joined by slashes, without openpi's closing `value` -> TensorStore."""
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            f"{directory} is an Orbax checkpoint, which needs TensorStore: pip install 'innerloop[orbax]'"
        ) from error
    metadata = read_json(directory / "_METADATA")
    tree = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not tree:
        raise CheckpointError(f"{directory / '_METADATA'} lists no arrays: the save did not finish, use another step")
    base = f"file://{directory.absolute()}/"
    if metadata.get("use_ocdbt", (directory / "manifest.ocdbt").is_file()):
        _check_files(directory, base, tensorstore)
        store: dict[str, Any] = {"driver": "ocdbt", "base": base}
    else:
        store = {"driver": "file", "path": base.removeprefix("file://")}
    stored = {key.decode() for key in tensorstore.KvStore.open(store).result().list().result()}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    arrays = {}
    for entry in tree.values():
        path = [str(part["key"]) for part in entry["key_metadata"]]
        if path[0] != "params":
            continue
        name = ".".join(path)
        spec = {"driver": driver, "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"}}
        try:
            array = tensorstore.open(spec, read=True).result()
        except ValueError as error:
            raise CheckpointError(
                f"{directory}: array '{name}' is listed but not stored: download the checkpoint again"
            ) from error
        if metadata.get("store_array_data_equal_to_fill_value"):
            _check_chunks(directory, name, array, stored)
        arrays["/".join(path[1:-1] if path[-1] == "value" else path[1:])] = array
    return dict(sorted(arrays.items()))


def _check_files(directory: Path, base: str, tensorstore: Any) -> None:
    """Walk the store's own index: every data file that it points into must exist and be long enough."""
    store = tensorstore.KvStore.open(base).result()
    try:
        manifest = tensorstore.ocdbt.dump(store).result()
        todo = [manifest["versions"][-1]["root"]["location"]]
        while todo:
            location = todo.pop()
            _check_extent(directory, location)
            if location.startswith("btreenode:"):
                entries = tensorstore.ocdbt.dump(store, location).result()["entries"]
                todo += [e[k] for e in entries for k in ("location", "indirect_value") if k in e]
    except (ValueError, IndexError) as error:
        raise CheckpointError(
            f"{directory}: the index of the stored arrays cannot be read ({str(error)[:200]}): "
            "the save did not finish or the copy is incomplete, download it again"
        ) from error


def _check_extent(directory: Path, location: str) -> None:
    """location: `<kind>:<directory>:<file>:<offset>:<length>`, as the store's dump writes it."""
    _, folder, name, offset, length = location.split(":")
    path = directory / folder / name
    size = path.stat().st_size if path.is_file() else -1
    if size < int(offset) + int(length):
        state = "does not exist" if size < 0 else f"is truncated ({size} bytes)"
        raise CheckpointError(f"{path} {state}: the copy is incomplete, download it again")


def _check_chunks(directory: Path, name: str, array: Any, stored: set[str]) -> None:
    """An absent chunk would silently read as zeros."""
    chunks = array.chunk_layout.write_chunk.shape
    wanted = math.prod(math.ceil(size / chunk) for size, chunk in zip(array.shape, chunks, strict=True))
    have = sum(key.startswith(f"{name}/") and not key.endswith((".zarray", "zarr.json", ".zattrs")) for key in stored)
    if have < wanted:
        raise CheckpointError(
            f"{directory}: array '{name}' has {have} of {wanted} chunks: the copy is incomplete, download it again"
        )
