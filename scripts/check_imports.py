"""Imports go down one list only; a folder's first docstring line says what may live there."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "innerloop"
# Highest first: a room may import rooms to its right, never to its left.
ORDER = [
    *(
        "cli",
        "arguments",
        "demo",
        "simulation",
        "serve",
        "client",
        "fleet",
        "measure",
        "adopt",
        "levels",
        "engine",
        "execute",
        "policies",
        "blocks",
        "process",
    ),
    *("weights", "parallel", "kernels", "runtime", "contract"),
]


def room(path: Path) -> str:
    """The room of a file: its top folder, or its own name at the top."""
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, at any depth of the syntax tree."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "innerloop" else [f"innerloop.{a.name}" for a in node.names]
        ours = [name.split(".")[1] for name in names if name.startswith("innerloop.")]
        found |= {name for name in ours if not name.startswith("_")}
    return found


def main() -> int:
    """Exit status 1 and one line a fault."""
    faults = []
    for path in sorted(ROOT.rglob("*.py")):
        mine = room(path)
        if path.parent == ROOT and mine in ("__init__", "__main__"):
            continue
        if mine not in ORDER:
            faults.append(f"{path}: room '{mine}' is not in the list of scripts/check_imports.py")
            continue
        above = {r for r in imported_rooms(path) - {mine} if r not in ORDER or ORDER.index(r) < ORDER.index(mine)}
        faults += [f"{path}: '{mine}' imports '{other}', which stands above it" for other in sorted(above)]
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text())):
            faults.append(f"{path}: no docstring that says what may live there")
    print("\n".join(faults) or f"imports go down in {len(list(ROOT.rglob('*.py')))} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
