"""How the CUDA kernels are started: with what is fixed at compile time, and in a chain before their predecessor ends."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from innerloop.kernels import compile
from innerloop.kernels.launch import limits

SOURCE = Path(__file__).parent / "source"

_chain: ContextVar["Chain | None"] = ContextVar("chain", default=None)


@dataclass
class Chain:
    """Launches under one `chain()`: whether the first has been made."""

    started: bool = False


@contextmanager
def chain() -> Iterator[None]:
    """Kernels launched inside, after the first, start before their predecessor ends and load weights meanwhile.

    The caller promises that nothing inside writes what these kernels may read early: weights, modulation and rotary
    tables, key_valid, K/V rows before `start`, and what real-time chunking gives.
    """
    token = _chain.set(Chain())
    try:
        yield
    finally:
        _chain.reset(token)


def begin(
    name: str,
    defines: Mapping[str, int],
    grid: int,
    threads: int,
    shared_bytes: int,
    cluster: int,
    arguments: ctypes.Structure,
    device: torch.device,
) -> None:
    """Launches source/<name>.cu, compiled with `defines`, on torch's current stream."""
    fixed = compile.fixed(defines)
    active = _chain.get()
    dependent = active is not None and active.started
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        function = compile.kernel(SOURCE / f"{name}.cu", fixed, f"sm_{limits(device).capability}", shared_bytes, index)
        compile.launch(function, grid, threads, shared_bytes, cluster, dependent, arguments)
    if active is not None:
        active.started = True
