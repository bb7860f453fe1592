"""Small files, short functions: CONTRIBUTING.md's limits."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = [path for folder in ("src", "bench", "scripts", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [path for pattern in ("*.cu", "*.cuh", "*.h") for path in sorted(ROOT.glob(f"[st]*/**/{pattern}"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
POLICIES = [
    path for path in sorted((ROOT / "src/innerloop/policies").iterdir()) if path.is_dir() and any(path.glob("*.py"))
]
FILE, FUNCTION, KERNEL, POLICY = 400, 50, 120, 500
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _bodies(path: Path) -> Iterator[tuple[str, int]]:
    """Functions by name with the lines of their statements: no signature, no docstring, no function inside."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            first = node.body[1:] if ast.get_docstring(node) is not None else node.body
            own = [part for part in first if not isinstance(part, Function)]
            yield node.name, sum((part.end_lineno or part.lineno) - part.lineno + 1 for part in own)


def test_files_are_small() -> None:
    assert len(CODE) > 200
    assert len(SOURCES) > 5
    assert not {str(p.relative_to(ROOT)): _lines(p) for p in (*CODE, *SOURCES, *TESTS) if _lines(p) >= FILE}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {name}": lines
        for path in CODE
        for name, lines in _bodies(path)
        if lines > (KERNEL if "kernels" in path.parts else FUNCTION)
    }
    assert not long


@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: folder.name)
def test_a_policy_is_short(folder: Path) -> None:
    """What two of them need stands in blocks/."""
    assert sum(map(_lines, folder.glob("*.py"))) < POLICY
