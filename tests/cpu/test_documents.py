"""Documents tell the truth about paths and commands."""

import re
from pathlib import Path

import pytest
import typer

from innerloop.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)")
COMMAND = re.compile(r"(?:^|`|\s)innerloop ([a-z]+)\b")
MODULE = re.compile(r"python -m ((?:bench|recipes|innerloop)[a-z_.]*)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_commands_exist(document: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    fenced = re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", document.read_text(), flags=re.DOTALL)
    used = {name for pair in fenced for text in pair for name in COMMAND.findall(text)}
    assert used - known <= {"import"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_modules_to_run_exist(document: Path) -> None:
    for module in MODULE.findall(document.read_text()):
        path = module.rstrip(".").replace(".", "/")
        places = [ROOT / f"{path}.py", ROOT / path / "__main__.py", ROOT / "src" / path / "__main__.py"]
        places += [ROOT / "src" / f"{path}.py"]
        assert any(place.exists() for place in places), module


def test_every_command_is_in_a_document() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"innerloop {name}" in text, name
