"""The order inside kernels that start early: they release, then wait; those before attention that reads ahead, the other way."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import innerloop.kernels

FILES = sorted(Path(innerloop.kernels.__file__).parent.rglob("*.py"))
# Loaded before the wait, by the first argument's name: weights, and what the callers promise to have written long before.
AHEAD = {
    "_ahead": {"valid_ptr", "k_at", "v_at"},
    "_attend": {"valid_at"},
    "_batched": {"bias_ptr"},
    "_product": {"bias_ptr"},
    "_rotate_and_store": {"cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr"},
    "_guide": {"previous_ptr", "weight_ptr", "prefix_ptr"},
    "_layer_norms": {"weight_ptr", "bias_ptr"},
    "_whole": {"valid_at", "k_at", "v_at"},
    "_norm": {"delta_bias_ptr", "gate_ptr", "scale_ptr", "shift_ptr"},
    "_project_and_step": {"weight_at", "bias_ptr", "hold_ptr"},
    "_project_in": {"weight_ptr", "bias_ptr"},
}

# What writes queries, keys and values. The cache's earlier rows, which attention reads ahead, must be there when it starts:
# what ran before a kernel that waits before it releases has ended by then.
BEFORE_ATTENTION = {"_rotated", "_rotate_and_store"}


def _calls(node: ast.AST, *names: str) -> Iterator[ast.Call]:
    for found in ast.walk(node):
        if isinstance(found, ast.Call) and ast.unparse(found.func) in names:
            yield found


def _loads(node: ast.AST, *loading: str) -> list[ast.Call]:
    """Through pointers or a descriptor, or by a function of these names."""
    calls = [found for found in ast.walk(node) if isinstance(found, ast.Call)]
    return [
        call
        for call in calls
        if (isinstance(call.func, ast.Attribute) and call.func.attr == "load") or ast.unparse(call.func) in loading
    ]


def _loaded(call: ast.Call) -> str:
    pointer = (
        call.func if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) != "tl.load" else call.args[0]
    )
    return ast.unparse(pointer).split(" ")[0]


FUNCTIONS = [node for path in FILES for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
# Of the kernels' own helpers, by the name of their file's function: a load's pointer is their first argument.
LOADING = {node.name for node in FUNCTIONS if _loads(node) and not any(_calls(node, "wait_for_producer"))}


def _kernels() -> dict[str, ast.FunctionDef]:
    """Every function that waits or releases, by name."""
    own = ("wait_for_producer", "release_successor")
    return {node.name: node for node in FUNCTIONS if any(_calls(node, *own))}


def _statement(kernel: ast.FunctionDef, name: str) -> int:
    """Where among the kernel's own statements, under no condition and in no loop, its one call of `name` stands."""
    found = [i for i, s in enumerate(kernel.body) if isinstance(s, ast.Expr) and ast.unparse(s.value) == f"{name}(PDL)"]
    assert len(found) == len(list(_calls(kernel, name))) == 1
    return found[0]


@pytest.mark.parametrize("kernel", _kernels().values(), ids=list(_kernels()))
def test_a_kernel_releases_and_waits(kernel: ast.FunctionDef) -> None:
    """Every program, and nothing is written before; loads ahead are those that are named here."""
    wait, release = (_statement(kernel, name) for name in ("wait_for_producer", "release_successor"))
    assert release - wait == (1 if kernel.name in BEFORE_ATTENTION else -1)
    before = ast.Module(kernel.body[:wait], [])
    assert not any(_calls(before, "tl.store", "tl.atomic_add"))
    assert {_loaded(call) for call in _loads(before, *LOADING)} == AHEAD.get(kernel.name, set())


def test_kernels_are_found() -> None:
    assert len(_kernels()) > 15
    assert {*AHEAD, *BEFORE_ATTENTION} <= set(_kernels())
