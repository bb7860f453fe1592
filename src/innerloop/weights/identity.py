"""The fingerprint: the same bundle gives the same string on every machine, one changed statistic another one."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from innerloop.weights.processors import ProcessorStep

_BLOCK = 16 << 20  # part of the definition: a tensor's digest is the digest of its blocks' digests


def digest_json(value: Any) -> str:
    """sha256 of a JSON-able value in canonical form (sorted keys, no spaces), hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def statistics_digest(statistics: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """sha256 over every feature's every statistic: names, shape, dtype and bytes."""
    return digest_json({f: {s: _array(a) for s, a in stats.items()} for f, stats in statistics.items()})


def processors_digest(*pipelines: Sequence[ProcessorStep] | None) -> str:
    """sha256 over the step lists in order: names, settings and state arrays."""
    return digest_json([None if steps is None else [_step(step) for step in steps] for steps in pipelines])


def fingerprint(
    *,
    weights: str,
    statistics: str,
    processors: str,
    adapter: str | None,
    precision: str,
    plan: Mapping[str, Any],
    kernels: Mapping[str, str],
) -> str:
    """32 hex digits over digests and versions; addresses and an earlier fingerprint in the plan do not count."""
    stages = {key: value for key, value in plan.items() if key != "fingerprint"}
    if "buffers" in stages:
        stages["buffers"] = [{k: v for k, v in buffer.items() if k != "address"} for buffer in stages["buffers"]]
    parts = {
        "schema": 1,
        "weights": weights,
        "statistics": statistics,
        "processors": processors,
        "adapter": adapter,
        "precision": precision,
        "plan": stages,
        "kernels": dict(kernels),
    }
    return digest_json(parts)[:32]


class TensorDigest:
    """sha256 over names, dtypes, shapes and bytes of tensors in any order, hashed in blocks by several threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="digest")
        self._entries: dict[str, tuple[str, list[int], list[Future[bytes]]]] = {}
        self._pending: list[Future[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Start hashing one CPU tensor; it must not change before `wait` returns."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        blocks = [data[start : start + _BLOCK] for start in range(0, data.size, _BLOCK)]
        futures = [self._pool.submit(_block_digest, block) for block in blocks]
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries[name] = (dtype, list(tensor.shape), futures)
        self._pending += futures

    def wait(self) -> None:
        """Return when every tensor added so far has been hashed and may be freed."""
        for future in self._pending:
            future.result()
        self._pending.clear()

    def hexdigest(self) -> str:
        """The digest of everything added."""
        self.wait()
        return digest_json(
            {
                name: [dtype, shape, hashlib.sha256(b"".join(f.result() for f in futures)).hexdigest()]
                for name, (dtype, shape, futures) in self._entries.items()
            }
        )


def _block_digest(block: np.ndarray) -> bytes:
    return hashlib.sha256(block.data).digest()


def _array(array: np.ndarray) -> list[Any]:
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return [little.dtype.str, list(array.shape), hashlib.sha256(little.tobytes()).hexdigest()]


def _step(step: ProcessorStep) -> list[Any]:
    return [step.name, step.config, {name: _array(array) for name, array in step.state.items()}]
