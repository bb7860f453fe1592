"""Five Meta-World tasks as a policy sees them: two small cameras, the hand's pose, an instruction; 40 actions a second."""

import importlib
import warnings
from typing import Any

import numpy as np

from innerloop.contract.errors import InnerloopError

TASKS = {
    "reach-v3": "move the gripper to the red ball",
    "push-v3": "push the puck to the green ball",
    "drawer-close-v3": "close the green drawer",
    "button-press-topdown-v3": "press the red button from above",
    "window-open-v3": "open the window to the right",
}
CAMERAS = {"front": (-90.0, -60.0, 1.0), "side": (130.0, -40.0, 1.0)}  # azimuth and elevation in degrees, metres away
SIZE = 112  # pixels, both sides
WIDTH = 4  # of state and action
REPEAT = 2  # one action drives so many simulation steps of 12.5 ms
RATE = 40.0  # actions a second
NEEDED = "simulation needs {}: pip install 'innerloop[sim]'"
TARGET = (0.0, 0.72, 0.1)  # what both cameras look at, metres


def require(module: str) -> Any:
    """A module of the `sim` extra. Raises InnerloopError that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise InnerloopError(NEEDED.format(module)) from error


class World:
    """One task. `reset(seed)` places object and goal; `step` moves; `observe` renders what the policy gets.

    MuJoCo must be able to render without a display: see innerloop.simulation.display.
    """

    def __init__(self, task: str) -> None:
        if task not in TASKS:
            raise InnerloopError(f"there is no task {task!r}; choose of {', '.join(TASKS)}")
        classes = require("metaworld.env_dict").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        self.task, self.prompt = task, TASKS[task]
        self._mujoco = require("mujoco")
        self.environment = classes[f"{task}-goal-observable"](seed=0)
        self.environment.seeded_rand_vec, self.environment._freeze_rand_vec = True, False
        quality = self.environment.model.vis.quality
        quality.offsamples = quality.shadowsize = 0  # a software renderer spends nine tenths of its time on these
        self._renderers: dict[int, Any] = {}
        self.values = np.zeros(39)  # Meta-World's own observation, for scripted experts

    def reset(self, seed: int) -> None:
        """A new episode; the same seed gives the same one."""
        self.environment.seed(seed)
        self.values = self.environment.reset()[0]
        self.mark()

    def mark(self) -> None:
        """Put the goal's ball where the goal is: Meta-World does so after its own steps alone."""
        for name, position in self.environment._target_site_config:
            self.environment._set_pos_site(name, position)

    def step(self, action: np.ndarray) -> bool:
        """One action float [4] in -1..1: hand velocity x, y, z and gripper closing. True once the task is done."""
        done = False
        for _ in range(REPEAT):
            values, _, _, _, about = self.environment.step(np.clip(action, -1.0, 1.0).astype(np.float32))
            self.values, done = values, done or bool(about["success"])
        return done

    def hold(self, last: np.ndarray) -> np.ndarray:
        """The action that keeps still: no velocity, the gripper as it was told last."""
        return np.array([0.0, 0.0, 0.0, last[3]], np.float32)

    @property
    def state(self) -> np.ndarray:
        """float32 [4]: hand x, y, z in metres and the gripper's opening 0..1; nothing about objects."""
        return self.values[:4].astype(np.float32)

    def observe(self) -> dict[str, Any]:
        """The observation as a policy takes it: images, state, prompt."""
        images = {name: self.render(name) for name in CAMERAS}
        return {"images": images, "state": self.state, "prompt": self.prompt}

    def render(self, camera: str, size: int = SIZE) -> np.ndarray:
        """uint8 [size, size, 3] RGB of one camera."""
        view = self._mujoco.MjvCamera()
        view.lookat[:] = TARGET
        view.azimuth, view.elevation, view.distance = CAMERAS[camera]
        renderer = self._renderer(size)
        renderer.update_scene(self.environment.data, camera=view)
        return np.array(renderer.render())

    def close(self) -> None:
        """Frees the renderers."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _renderer(self, size: int) -> Any:
        if size not in self._renderers:
            renderer = self._mujoco.Renderer(self.environment.model, size, size)
            flags = self._mujoco.mjtRndFlag
            renderer.scene.flags[flags.mjRND_SHADOW] = renderer.scene.flags[flags.mjRND_REFLECTION] = 0
            self._renderers[size] = renderer
        return self._renderers[size]
