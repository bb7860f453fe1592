"""CUDA sources compiled for the processor, over emulator/device.h in place of fragment.cuh, and run there."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from innerloop.kernels import compile, launch
from innerloop.kernels.linear import rings
from innerloop.kernels.skinny import cross, cuda, start

HERE = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # then a kernel may touch nothing beside its tensors
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


class WrongLaunch(AssertionError):
    """What a kernel did that no kernel may do."""


class TensorMap(ctypes.Structure):
    """As device.h reads it, in the bytes of a driver's one."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "box_rows")),
        ("unused", ctypes.c_uint64 * 12),
    )


def _tensor_map(t: torch.Tensor, rows: int) -> "ctypes.Array[ctypes.c_uint64]":
    """In place of the driver's map of boxes of `rows` x 64."""
    made = TensorMap(data=t.data_ptr(), rows=t.shape[0], columns=t.shape[1], box_rows=rows)
    return (ctypes.c_uint64 * 16).from_buffer_copy(bytes(made))


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":  # gone with the process
    return tempfile.TemporaryDirectory(prefix="emulated-")


@functools.cache
def _library(source: Path, defines: tuple[tuple[str, int], ...], altered: tuple[str, str] | None) -> ctypes.CDLL:
    text = source.read_text()
    if altered is not None:
        assert altered[0] in text
        text = text.replace(*altered)
    lines = ['#include "device.h"', *(f"#define {name} {value}" for name, value in defines)]
    lines += [text, f"#define KERNEL {source.stem}", '#include "run.h"']
    text = "\n".join(lines)
    place = Path(_folder().name) / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place.with_suffix(".cpp").write_text(text)
    options = [
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        "-Wno-psabi",
        "-fno-strict-aliasing",
        "-Wl,-Bsymbolic",
        f"-I{HERE}",
        *(("-fsanitize=address", "-g", "-O1") if SANITIZED else ()),
    ]
    command = [str(COMPILER), *options, str(place.with_suffix(".cpp")), "-o", str(place.with_suffix(".so"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(place.with_suffix(".so")))
    library.launch.restype = ctypes.c_char_p
    return library


def _launch(
    kernel: tuple[Path, tuple[tuple[str, int], ...]],
    grid: int,
    threads: int,
    shared_bytes: int,
    cluster: int,
    dependent: bool,
    arguments: ctypes.Structure,
    seed: int = 1,
    altered: tuple[str, str] | None = None,
) -> None:
    """In place of compile.launch."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(arguments) + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64  # as alignas(64) asks
    ctypes.memmove(at, ctypes.addressof(arguments), ctypes.sizeof(arguments))
    library = _library(*kernel, altered)
    wrong = library.launch(ctypes.c_void_p(at), grid, threads, shared_bytes, cluster, ctypes.c_uint64(seed))
    if wrong is not None:
        raise WrongLaunch(wrong.decode())


@contextmanager
def emulated(multiprocessors: int = 132, seed: int = 1, altered: tuple[str, str] | None = None) -> Iterator[None]:
    """CUDA kernels launched inside run here, on tensors of the CPU, in the random order of `seed`.

    altered: words of the source and what stands for them, to see that a fault would be noticed.
    """
    device = launch.Limits("emulated", 90, multiprocessors, 232448, 50 << 20)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compile, "kernel", lambda path, defines, *_: (path, defines))
        patched.setattr(rings, "_tensor_map", _tensor_map)
        patched.setattr(compile, "launch", functools.partial(_launch, seed=seed, altered=altered))
        for module in (launch, start, cuda, cross):
            patched.setattr(module, "limits", lambda _: device)
        patched.setattr(torch.cuda, "device", lambda _: nullcontext())
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        yield
