"""A session's state at one moment, as a value: in device memory, host memory or a file."""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from innerloop.contract.errors import CapsuleError
from innerloop.runtime.backing import Pool, Saved
from innerloop.runtime.executor import DeviceThread
from innerloop.runtime.layout import Layout
from innerloop.runtime.refresh import Ledger, Refresh
from innerloop.runtime.windows import Kept

Tier = Literal["device", "host"]
MAGIC = b"innerloop capsule 1\n"


@dataclass(frozen=True)
class Home:
    """Where a capsule can be restored: one runtime's memory, thread and content numbers."""

    pool: Pool
    thread: DeviceThread
    refresh: Refresh


@dataclass(frozen=True)
class Capsule:
    """State region, input windows and versions of a session; never changes, may be restored any number of times.

    `digest` is the SHA-256 of state and inputs for the host tier; the device tier has an integrity word instead.
    """

    fingerprint: str
    tier: Tier
    saved: Saved = field(repr=False)
    ledger: Ledger = field(repr=False)
    values: Kept = field(repr=False)
    home: Home = field(repr=False)
    digest: str = ""

    @property
    def bytes(self) -> int:
        """State and inputs, in bytes."""
        return self.saved.backing.data.numel() + sum(piece.size for piece in self._pieces())

    def to(self, tier: Tier) -> "Capsule":
        """The same capsule in device or host memory. Raises CapsuleError if it is damaged."""
        if tier == self.tier:
            return self
        return self.home.thread.call(lambda: self._moved(tier))

    def verify(self) -> None:
        """Reads every byte of the state. Raises CapsuleError if one has changed since the snapshot."""
        if self.tier == "host":
            whole = self.content_digest() == self.digest
        else:
            whole = self.home.thread.call(self.saved.backing.intact)
        if not whole:
            raise CapsuleError("the capsule's checksum does not match its contents: it is damaged, discard it")

    def save(self, path: str | Path) -> None:
        """Writes a file that appears whole or not at all. Raises CapsuleError for a policy without a fingerprint."""
        if not self.fingerprint.rpartition(":")[0]:
            raise CapsuleError(
                "the plan has no fingerprint, so a file could be restored into another policy: give it one"
            )
        write_file(self.to("host"), Path(path))

    def content_digest(self) -> str:
        """SHA-256 of the state and input bytes, for the host tier."""
        digest = hashlib.sha256(self.saved.backing.data.numpy().data)
        for piece in self._pieces():
            digest.update(piece.data)
        return digest.hexdigest()

    def _pieces(self) -> list[np.ndarray]:
        return [piece for pieces in self.values if pieces is not None for piece in pieces]

    def _moved(self, tier: Tier) -> "Capsule":
        self.verify()
        backing = self.home.pool.copy(self.saved.backing.data, host=tier == "host")
        if tier == "device":
            backing.word()
        return seal(self.fingerprint, tier, Saved(backing, self.saved.contents), self.ledger, self.values, self.home)


def seal(fingerprint: str, tier: Tier, saved: Saved, ledger: Ledger, values: Kept, home: Home) -> Capsule:
    """A capsule with its checksum; the host tier waits for the copy to have arrived. Only on the device's thread."""
    if tier == "device":
        saved.backing.word()
        return Capsule(fingerprint, tier, saved, ledger, values, home)
    if home.thread.stream is not None:
        home.thread.stream.synchronize()
    unsealed = Capsule(fingerprint, tier, saved, ledger, values, home)
    return Capsule(fingerprint, tier, saved, ledger, values, home, unsealed.content_digest())


def layout_digest(layout: Layout, refresh: Refresh) -> str:
    """What must agree, beside the policy's fingerprint, for a capsule's bytes and versions to mean the same."""
    facts = {
        "state": [[n, *layout.places[n], list(b.shape), str(b.dtype)] for n, b in layout.buffers.items()],
        "steps": [[[s.key, list(s.names), s.reads, s.writes] for s in steps] for steps in refresh.steps],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_file(capsule: Capsule, path: Path) -> None:
    """Magic, header length, header, its SHA-256, state bytes, input bytes; the header holds the contents' SHA-256."""
    header = {
        "fingerprint": capsule.fingerprint,
        "byteorder": sys.byteorder,
        "contents": capsule.saved.contents,
        "versions": capsule.ledger.versions,
        "ran": capsule.ledger.ran,
        "state": capsule.saved.backing.data.numel(),
        "inputs": [None if v is None else [piece.size for piece in v] for v in capsule.values],
        "digest": capsule.digest,
    }
    text = json.dumps(header).encode()
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for part in (MAGIC, len(text).to_bytes(8, "little"), text, hashlib.sha256(text).digest()):
            file.write(part)
        file.write(capsule.saved.backing.data.numpy().data)
        for pieces in capsule.values:
            for piece in pieces or ():
                file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_file(path: Path, fingerprint: str, home: Home) -> Capsule:
    """A capsule of the host tier. Raises CapsuleError for a damaged file or another policy's."""
    data = path.read_bytes()
    header, body = _header(path, data)
    if header["fingerprint"] != fingerprint:
        raise CapsuleError(mismatch(header["fingerprint"], fingerprint))
    if header["byteorder"] != sys.byteorder:
        raise CapsuleError(f"{path} was written on a {header['byteorder']}-endian machine: move it as a host capsule")
    lengths = [size for sizes in header["inputs"] if sizes is not None for size in sizes]
    ends = list(itertools.accumulate([header["state"], *lengths]))
    if len(body) != ends[-1]:
        raise CapsuleError(
            f"{path} holds {len(body)} bytes of state and inputs, not {ends[-1]}: it is cut off or damaged"
        )
    flat = np.frombuffer(body, np.uint8)
    pieces = iter([flat[start:end].copy() for start, end in itertools.pairwise(ends)])
    values: Kept = [None if s is None else tuple(next(pieces) for _ in s) for s in header["inputs"]]
    backing = home.pool.take(host=True)
    backing.data.copy_(torch.from_numpy(flat[: ends[0]].copy()))
    ledger, contents = renumbered(header["versions"], header["ran"], header["contents"], home.refresh.fresh)
    capsule = Capsule(fingerprint, "host", Saved(backing, contents), ledger, values, home, header["digest"])
    capsule.verify()
    return capsule


def renumbered(
    versions: Sequence[int], ran: Sequence[Sequence[int] | None], contents: Sequence[int], fresh: Callable[[], int]
) -> tuple[Ledger, tuple[int, ...]]:
    """Another runtime's content numbers as numbers of this one; equal ones stay equal."""
    numbers: dict[int, int] = {}

    def new(number: int) -> int:
        if number <= 0:
            return number
        if number not in numbers:
            numbers[number] = fresh()
        return numbers[number]

    ledger = Ledger([new(v) for v in versions], [None if r is None else tuple(map(new, r)) for r in ran])
    return ledger, tuple(map(new, contents))


def mismatch(found: str, wanted: str) -> str:
    """The message for a capsule of another policy or layout."""
    what = "weights or configuration" if found.rpartition(":")[0] != wanted.rpartition(":")[0] else "buffer layout"
    return f"the capsule is of other {what} ({found[:16]}... against {wanted[:16]}...): take one from this policy"


def _header(path: Path, data: bytes) -> tuple[Mapping[str, Any], memoryview]:
    start = len(MAGIC) + 8
    if data[: len(MAGIC)] != MAGIC:
        raise CapsuleError(f"{path} is not a capsule file of this version")
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    text, digest = data[start:end], data[end : end + 32]
    if hashlib.sha256(text).digest() != digest:
        raise CapsuleError(f"{path} is damaged: its header does not match its checksum")
    header: Mapping[str, Any] = json.loads(text)
    return header, memoryview(data)[end + 32 :]
