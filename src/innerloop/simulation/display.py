"""Rendering without a display: which GL library MuJoCo can use here, and how to get one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

from innerloop.contract import InnerloopError
from innerloop.simulation.world import NEEDED

_DRAW = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).render()"
_PACKAGE = "libosmesa6"


class DisplayError(InnerloopError):
    """Nothing here can render; the message has the command that changes it."""


def prepare(say: Callable[[str], object] = lambda line: None) -> str:
    """Makes MuJoCo render through EGL or OSMesa, installing Debian's package where that is allowed; names the one used.

    Raises DisplayError. To be called before anything renders; `say` hears of an installation.
    """
    if find_spec("mujoco") is None:  # not imported: MuJoCo reads its choice when it is
        raise InnerloopError(NEEDED.format("mujoco"))
    found = _usable()
    if found is None and _may_install():
        say(f"nothing renders here yet: installing {_PACKAGE}")
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", _PACKAGE)
        found = _usable()
    if found is None:
        raise DisplayError(f"MuJoCo can render neither through EGL nor OSMesa; type: sudo apt-get install {_PACKAGE}")
    return found


def _usable() -> str | None:
    wanted = os.environ.get("MUJOCO_GL")  # MuJoCo's own variable, and its only way to be told
    for name in [wanted] if wanted in ("egl", "osmesa") else ["egl", "osmesa"]:
        # In a process of its own: a missing driver may end it.
        environment = {**os.environ, "MUJOCO_GL": name, "PYOPENGL_PLATFORM": name}
        tried = subprocess.run([sys.executable, "-c", _DRAW], env=environment, capture_output=True, check=False)
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = name
            return name
    return None


def _may_install() -> bool:
    return shutil.which("apt-get") is not None and hasattr(os, "geteuid") and os.geteuid() == 0


def _apt(*words: str) -> None:
    subprocess.run(["apt-get", "-qq", *words], capture_output=True, check=False)
