"""The CUDA C++ kernels under AddressSanitizer, in processes of their own: nothing beside their tensors is read or written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import COMPILER, needs_compiler

pytestmark = needs_compiler
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# One of each kernel; all of them in minutes: CONTRIBUTING.md.
CHOSEN = (
    "test_rings_emulated.py::test_one_group[gelu_tanh]",
    "test_rings_emulated.py::test_gated_units[64]",
    "test_rings_emulated.py::test_rows_that_do_not_begin_at_sixteen_bytes",
    "test_skinny_emulated.py::test_norm_and_gated_unit[True-7]",
    "test_skinny_emulated.py::test_projection_gate_and_residual[2-7]",
    "test_skinny_emulated.py::test_attention_of_few_queries[7-200]",
    "test_skinny_emulated.py::test_norm_query_and_attention[1-64-1024-1-1-2-8]",
    "test_skinny_emulated.py::test_the_ends_of_a_step[True]",
)
BEYOND = """
import sys
sys.path.insert(0, {here!r})
import torch
from emulated import emulated
from innerloop.kernels.linear import rings

x, weight = torch.randn(41, 320).bfloat16(), torch.randn(64, 320).bfloat16()
with emulated(altered=("row + r < p.rows && ", "")):
    rings.product(x, weight, None, rings.tile(1, 32), None)
"""


def _library(name: str) -> str:
    """Where g++ keeps a library."""
    found = subprocess.run([str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"needs g++'s {name}")
    return found.stdout.strip()


def _sanitized(*command: str) -> "subprocess.CompletedProcess[str]":
    # It looks for the C++ library's functions when it begins: that has to be there too.
    libraries = [_library(name) for name in ("libasan.so", "libstdc++.so")]
    environment = {
        **os.environ, "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_kernels_stay_within_their_tensors() -> None:
    nodes = [str(HERE / node) for node in CHOSEN]
    done = _sanitized("-m", "pytest", "-o", "addopts=", "-x", "-p", "no:cacheprovider", *nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHOSEN)} passed" in done.stdout


def test_a_store_beyond_the_last_row_is_noticed() -> None:
    done = _sanitized("-c", BEYOND.format(here=str(HERE)))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
