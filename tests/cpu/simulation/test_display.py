"""A machine where nothing renders: what is tried, what is installed, what is said."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from innerloop.contract import InnerloopError
from innerloop.simulation import display
from innerloop.simulation.display import DisplayError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MuJoCo is there; `works` are the libraries that render, `installable` those that apt-get brings."""
    one = SimpleNamespace(works=set(), installable=set(), root=True, commands=[], tried=[])

    def process(command: list[str], env: dict[str, str] | None = None, **_: Any) -> Any:
        if command[0] == "apt-get":
            one.commands.append(" ".join(command))
            one.works |= one.installable if "install" in command else set()
            return SimpleNamespace(returncode=0)
        assert env is not None
        one.tried.append(env["MUJOCO_GL"])
        return SimpleNamespace(returncode=0 if env["MUJOCO_GL"] in one.works else -6)

    monkeypatch.setattr(display, "find_spec", lambda name: object())
    monkeypatch.setattr(display.subprocess, "run", process)
    monkeypatch.setattr(display.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(display.os, "geteuid", lambda: 0 if one.root else 1000)
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(name, "")
    return one


def test_egl_first_then_osmesa(machine: Any) -> None:
    machine.works = {"osmesa"}
    assert display.prepare() == os.environ["MUJOCO_GL"] == os.environ["PYOPENGL_PLATFORM"] == "osmesa"
    assert machine.tried == ["egl", "osmesa"]
    machine.works = {"egl", "osmesa"}
    os.environ["MUJOCO_GL"] = ""
    assert display.prepare() == "egl"
    assert machine.commands == []


def test_what_the_user_chose_is_the_only_one_tried(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    machine.works = {"egl", "osmesa"}
    assert (display.prepare(), machine.tried) == ("osmesa", ["osmesa"])


def test_where_it_may_it_installs_and_says_so(machine: Any) -> None:
    machine.installable, said = {"osmesa"}, []
    assert display.prepare(said.append) == "osmesa"
    assert said == ["nothing renders here yet: installing libosmesa6"]
    assert machine.commands[-1] == "apt-get -qq install -y --no-install-recommends libosmesa6"


@pytest.mark.parametrize("root", [True, False])
def test_where_nothing_helps_it_names_one_command(machine: Any, root: bool) -> None:
    machine.root = root
    with pytest.raises(DisplayError, match="neither through EGL nor OSMesa; type: sudo apt-get install libosmesa6$"):
        display.prepare()
    assert bool(machine.commands) == root


def test_without_mujoco_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    with pytest.raises(InnerloopError, match=r"simulation needs mujoco: pip install 'innerloop\[sim\]'"):
        display.prepare()


def test_looking_for_mujoco_does_not_import_it() -> None:
    """MuJoCo reads its choice of library when it is imported."""
    code = "import sys, innerloop.simulation.display; sys.exit('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
