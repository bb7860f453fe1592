"""Ours against the official implementation, stage by stage with pinned noise: which differs first, by how much."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch

from innerloop.blocks.qwen3_vl import outputs
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import use_kernels
from innerloop.kernels.image import frames_to_patches
from innerloop.measure.agreement import cosine_of
from innerloop.policies.interface import Prepared
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter

Trace = dict[str, np.ndarray]  # stage -> values without a batch dimension, in the order they are computed


class Official(Protocol):
    """An official implementation that can be read stage by stage; see measure/against."""

    def trace(self, observation: Mapping[str, Any], noise: np.ndarray) -> Trace:
        """Every stage's result, as measure.against.lerobot.LeRobotPolicy.trace describes."""
        ...


@dataclass(frozen=True)
class Limit:
    """What counts as equal: max_abs is relative to the largest official value where `relative`; cosine is a minimum."""

    max_abs: float
    relative: bool = False
    cosine: float = -1.0


EXACT = Limit(0.0)
_LIMITS: dict[str, dict[str, Limit]] = {
    "fp32": {
        "images": Limit(1e-6),
        "pixels": Limit(1e-6),
        "state": EXACT,
        "normalized": Limit(1e-4),
        "actions": Limit(1e-5, relative=True),
        "": Limit(1e-4, relative=True),
    },
    # bf16 keeps 8 bits of every activation.
    "bf16": {
        "images": Limit(1e-2),
        "state": Limit(1e-6),
        "normalized": Limit(0.05, relative=True, cosine=0.999),
        "actions": Limit(0.05, relative=True, cosine=0.999),
        "": Limit(0.1, relative=True, cosine=0.999),
    },
}


@dataclass(frozen=True)
class StageParity:
    """One stage's comparison; `worst` is the index of the largest difference, `ours` and `official` its two values.

    relative: the largest difference over the largest official magnitude.
    """

    stage: str
    equal: bool
    max_abs: float
    relative: float
    limit: float
    cosine: float
    worst: tuple[int, ...]
    ours: float
    official: float


@dataclass(frozen=True)
class ParityReport:
    """All stages in order. A stage after the first that differs inherits its difference."""

    precision: str
    stages: tuple[StageParity, ...]

    @property
    def first(self) -> StageParity | None:
        """The first stage that differs."""
        return next((stage for stage in self.stages if not stage.equal), None)

    @property
    def passed(self) -> bool:
        """No stage differs."""
        return self.first is None

    def stage(self, name: str) -> StageParity:
        """One stage by name."""
        return next(stage for stage in self.stages if stage.stage == name)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "precision": self.precision,
            "passed": self.passed,
            "first": self.first.stage if self.first else None,
            "stages": [asdict(stage) for stage in self.stages],
        }

    def text(self) -> str:
        """A table for people, and the verdict."""
        rows = [f"{'stage':<13}{'max abs':>9}{'limit':>9}{'cosine':>10}  worst element (ours, official)"]
        for s in self.stages:
            mark = "" if s.equal else "  <- differs"
            where = f"{list(s.worst)} ({s.ours:.5g}, {s.official:.5g})"
            rows.append(f"{s.stage:<13}{s.max_abs:>9.2g}{s.limit:>9.2g}{s.cosine:>10.6f}  {where}{mark}")
        if self.first is None:
            return "\n".join([*rows, f"Every stage agrees ({self.precision})."])
        first = self.first
        rows.append(
            f"The first stage that differs is {first.stage}: by {first.max_abs:.3g} at {list(first.worst)}, "
            f"where {first.limit:.3g} is allowed ({self.precision})."
        )
        return "\n".join(rows)


def compare(
    policy: LoadedPolicy, official: Official, observation: Mapping[str, Any], noise: np.ndarray
) -> ParityReport:
    """Runs both sides on one observation and noise float32 [horizon, max_action_dim], and compares stage by stage.

    Absent cameras and padded prompt rows are left out: neither side reads them.
    """
    precision = policy.placement.precision
    theirs = official.trace(observation, noise)
    ours = intermediates(policy, observation, noise)
    if "camera_mask" in theirs:
        theirs, ours = _by_layer(theirs), _by_layer(ours)
        used = _Used(theirs["camera_mask"].astype(bool), theirs["token_mask"].astype(bool), theirs["vision"].shape[1])
        theirs, ours = ({name: used.of(name, trace[name]) for name in trace} for trace in (theirs, ours))
    stages = [compare_stage(name, ours[name], theirs[name], precision) for name in theirs if name in ours]
    return ParityReport(precision, tuple(stages))


def compare_stage(name: str, ours: np.ndarray, official: np.ndarray, precision: str) -> StageParity:
    """One stage; integers and booleans must be equal, floats within the precision's limit. Raises on unequal shapes."""
    if ours.shape != official.shape:
        raise InnerloopError(f"stage {name}: ours has shape {ours.shape}, the official one {official.shape}")
    limits = _LIMITS[precision]
    exact = official.dtype.kind in "iub"
    limit = EXACT if exact else limits.get(name, limits[""])
    a, b = ours.astype(np.float64), official.astype(np.float64)
    difference = np.abs(a - b)
    difference[~np.isfinite(difference)] = np.inf
    worst = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    largest = float(difference[worst])
    magnitude = float(np.abs(b).max())
    allowed = limit.max_abs * (max(1.0, magnitude) if limit.relative else 1.0)
    cosine = cosine_of(a, b)
    return StageParity(
        stage=name,
        equal=largest <= allowed and (exact or cosine >= limit.cosine),
        max_abs=largest,
        relative=largest / magnitude if magnitude else largest,
        limit=allowed,
        cosine=cosine,
        worst=worst,
        ours=float(a[worst]),
        official=float(b[worst]),
    )


def intermediates(policy: LoadedPolicy, observation: Mapping[str, Any], noise: np.ndarray) -> Trace:
    """Our side of a comparison: the policy's own plan, run by the interpreter, read buffer by buffer.

    Names and shapes are those of the official side's `trace`.
    """
    if policy.placement.batch != 1:
        raise InnerloopError(f"parity compares one robot; load the policy with batch=1, not {policy.placement.batch}")
    prepared = policy.processor.prepare(observation)
    plan = policy.plans[policy.capacity(int(prepared.inputs["prompt_length"][0]))]
    interpreter = Interpreter(plan, Arena(plan, policy.placement.device), check=False)
    for name, value in {**prepared.inputs, "noise": np.asarray(noise, np.float32)}.items():
        interpreter.write(name, value)
    with use_kernels(policy.placement.kernels), _Steps(policy.model) as steps:
        interpreter.run(plan, skip=False)
        before = _flow_stages if "grids" not in plan.buffers else _chat_stages
        result = before(policy, prepared, interpreter)
    rising = "grids" in plan.buffers
    result |= {f"velocity.{step}": value for step, value in enumerate(steps.velocities(policy.config.steps, rising))}
    normalized = _numpy(interpreter.read("actions"))[0]
    actions = policy.processor.finish(normalized, prepared.context)
    return result | {"normalized": normalized[:, : actions.shape[1]], "actions": actions}


def _flow_stages(policy: LoadedPolicy, prepared: Prepared, interpreter: Interpreter) -> Trace:
    """As measure.against.lerobot.LeRobotPolicy.trace."""
    config = policy.config
    prefix = len(config.cameras) * config.vision.tokens + config.prompt_capacity
    vision = _numpy(interpreter.read("image_tokens"))[0]
    return {
        "images": _pictures(policy, interpreter),
        "camera_mask": prepared.inputs["camera_mask"],
        "tokens": prepared.inputs["tokens"],
        "token_mask": np.arange(config.prompt_capacity) < int(prepared.inputs["prompt_length"][0]),
        "state": prepared.context.normalized_state,
        "position_ids": _numpy(interpreter.read("positions"))[0, :prefix],
        "vision": vision.reshape(len(config.cameras), config.vision.tokens, -1),
        "keys": _numpy(interpreter.read("keys"))[:, 0],
        "values": _numpy(interpreter.read("values"))[:, 0],
    }


def _chat_stages(policy: LoadedPolicy, prepared: Prepared, interpreter: Interpreter) -> Trace:
    """As measure.against.groot.LeRobotGroot.trace; the language model is run once more, its output has no buffer."""
    model: Any = policy.model
    inputs, tensors = prepared.inputs, interpreter.arena.tensors
    length, merge = int(inputs["prompt_length"][0]), policy.config.vision.merge
    cut = zip(_numpy(interpreter.read("pixels")), inputs["grids"], strict=True)
    shown = [(p, int(h), int(w)) for p, (h, w) in cut if h]
    frames = [np.repeat(p[: h * w].reshape(h * w, 1, -1, 3), policy.config.vision.temporal, 1) for p, h, w in shown]
    planes = np.concatenate(frames).transpose(0, 3, 1, 2)  # channel, frame, pixel, as the official side has them
    visual, room = tensors["visual"][0], policy.config.slots.patches // merge**2
    vision = [visual[i * room :][: h * w // merge**2] for i, (_, h, w) in enumerate(shown)]
    *_, features = outputs(tensors, model.backbone.language, length)
    refined = model.refine(features, tensors["key_valid"][:, :length].contiguous())
    return {
        "tokens": inputs["tokens"][:length],
        "grids": np.array([[h, w] for _, h, w in shown]),
        "pixels": planes.reshape(len(planes), -1).astype(np.float32) / 127.5 - 1.0,
        "position_ids": inputs["positions"][:, :length],
        "state": inputs["state"],
        "vision": _numpy(torch.cat(vision)),
        "features": _numpy(features)[0],
        "refined": _numpy(refined)[0],
        "state_token": _numpy(interpreter.read("state_token"))[0, 0],
    }


class _Steps:
    """Notes what goes into and comes out of a flow model's solver steps while it is entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._denoise: Callable[..., torch.Tensor] = getattr(model, "denoise")  # noqa: B009
        self._patch = mock.patch.object(model, "denoise", self._noted)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> "_Steps":
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _noted(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        before = x.clone()
        after = self._denoise(x, *arguments)
        self._seen.append((before, after.clone()))
        return after

    def velocities(self, steps: int, rising: bool) -> list[np.ndarray]:
        """float32 [chunk, max_action_dim] a step: x moves by velocity / steps, against it where time falls."""
        scale = steps if rising else -steps
        return [_numpy((after - before) * scale)[0] for before, after in self._seen]


@dataclass(frozen=True)
class _Used:
    """Which cameras and prefix rows a decision reads."""

    cameras: np.ndarray
    tokens: np.ndarray
    patches: int

    def of(self, name: str, values: np.ndarray) -> np.ndarray:
        """The part of a stage that is read; cameras and rows keep their order."""
        used: np.ndarray = values
        if name in ("images", "vision"):
            used = values[self.cameras]
        elif name == "position_ids" or name.startswith(("keys.", "values.")):
            used = values[np.concatenate([self.cameras.repeat(self.patches), self.tokens])]
        return used


def _by_layer(trace: Trace) -> Trace:
    """keys and values become keys.0, values.0, keys.1 and so on, the order in which layers fill the cache."""
    result: Trace = {}
    for name, values in trace.items():
        if name == "keys":
            for layer, (keys, other) in enumerate(zip(values, trace["values"], strict=True)):
                result |= {f"keys.{layer}": keys, f"values.{layer}": other}
        elif name != "values":
            result[name] = values
    return result


def _pictures(policy: LoadedPolicy, interpreter: Interpreter) -> np.ndarray:
    """float32 [cameras, 3, size, size]: the frames as the vision stage cuts them, put together again."""
    sizes = policy.config.vision
    side, patch = sizes.image_size // sizes.patch_size, sizes.patch_size
    tensors = interpreter.arena.tensors
    patches = frames_to_patches(tensors["frames"], tensors["frame_sizes"], sizes.image_size, patch, torch.float32)
    tiles = patches[0].reshape(-1, side, side, 3, patch, patch)
    return _numpy(tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * patch, side * patch))


def _numpy(value: torch.Tensor) -> np.ndarray:
    array: np.ndarray = (value.float() if value.is_floating_point() else value).numpy(force=True)
    return array
