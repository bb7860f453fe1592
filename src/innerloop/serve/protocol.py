"""What every transport passes to the worker and gets back, and the errors a robot can be told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from innerloop.client.packing import MessageError
from innerloop.contract.errors import InnerloopError
from innerloop.contract.policy import Chunk, Previous

MAX_PROMPT = 8192  # characters
MAX_NAME = 128  # characters of a session or episode id


class RequestError(InnerloopError):
    """A request is refused. `code` is for programs, the text for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Request:
    """One observation of one robot and how it wants to be answered."""

    observation: Mapping[str, Any]  # {"images": {camera: uint8 HWC}, "state": float [n], "prompt": str}
    session: str
    episode: str | int | None = None
    seed: int | None = None
    noise: np.ndarray | None = None
    previous: Previous | None = None  # the chunk that the new one continues (real-time chunking)
    timestamp: float | None = None  # when the robot observed, on its own clock; returned as it came
    deadline_ms: float | None = None  # counted from the arrival of the request
    tag: str | int | None = None  # returned as it came, so that a client can match answers


@dataclass(frozen=True)
class Reply:
    """The one answer to a request: a chunk, or a code and a text that say why there is none."""

    request: Request
    chunk: Chunk | None = None
    code: str = "ok"
    message: str = ""
    weights_version: int = 0
    violations: int = 0  # action values that a limit clamped
    server_timing: Mapping[str, float] = field(default_factory=dict)  # ms: queue_ms, infer_ms, total_ms


def read_request(message: Any, client: str) -> Request:
    """A decoded openpi message, with our optional keys beside the observation, as a request.

    Raises RequestError. `client` names the session of clients that name none.
    """
    if not isinstance(message, dict) or any(not isinstance(key, str) for key in message):
        raise RequestError("bad_request", "a request is a map with text keys: an observation, as openpi sends it")
    try:
        return Request(
            observation=_observation(message),
            session=_name(message, "session") or client,
            episode=_identifier(message, "episode"),
            seed=_whole(message, "seed"),
            noise=_noise(message),
            previous=_previous(message),
            timestamp=_number(message, "timestamp"),
            deadline_ms=_deadline(message),
            tag=_identifier(message, "id"),
        )
    except MessageError as error:
        raise RequestError("bad_request", str(error)) from error


def write_reply(reply: Reply) -> dict[str, Any]:
    """A reply with a chunk as a message; every array in it has the horizon as its first dimension."""
    assert reply.chunk is not None
    chunk, request = reply.chunk, reply.request
    return {
        "actions": np.ascontiguousarray(chunk.actions, np.float32),
        "actions_normalized": np.ascontiguousarray(chunk.normalized, np.float32),
        "id": request.tag,
        "session": request.session,
        "episode": request.episode,
        "timestamp": request.timestamp,
        "weights_version": reply.weights_version,
        "violations": reply.violations,
        "server_timing": dict(reply.server_timing),
        "policy_timing": {name: float(value) for name, value in chunk.timing.items()},
        "receipt": None if chunk.receipt is None else plain(asdict(chunk.receipt)),
    }


def write_error(code: str, message: str, tag: str | int | None = None) -> dict[str, Any]:
    """An error as a message; the text is cut to 2,000 characters."""
    return {"error": code, "message": message[:2000], "id": tag}


def plain(value: Any) -> Any:
    """Any metadata as plain JSON data: tuples become lists, numpy becomes Python, the unknown becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def observation(images: Mapping[str, Any], state: Any, prompt: Any) -> dict[str, Any]:
    """An observation whose types are right and whose numbers are finite. Raises RequestError.

    Pictures may be HWC, or CHW as openpi's ALOHA clients send them; None says that a robot lacks a camera.
    """
    checked = {
        _short(str(name)): None if picture is None else _picture(str(name), picture) for name, picture in images.items()
    }
    if len(checked) != len(images):
        raise RequestError("observation", "two pictures have the same camera name; give each camera its own")
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT:
        raise RequestError("observation", f"'prompt' is not a text of at most {MAX_PROMPT} characters")
    return {"images": checked, "state": _vector("state", state), "prompt": prompt}


def _observation(message: dict[str, Any]) -> dict[str, Any]:
    images = message.get("images")
    if images is None:
        images = {key: value for key, value in message.items() if _is_picture(key, value)}
    if not isinstance(images, dict):
        raise RequestError("observation", "'images' is not a map of camera name to picture")
    prompt = message.get("prompt", message.get("task"))
    if prompt is None:
        raise RequestError("observation", "the observation has no 'prompt'; send the task in words under that name")
    return observation(images, _state(message), prompt)


def _state(message: dict[str, Any]) -> Any:
    for key in ("state", "observation/state", "observation.state"):
        if key in message:
            return message[key]
    joints = message.get("observation/joint_position")  # openpi's DROID clients send joints and gripper apart
    gripper = message.get("observation/gripper_position")
    if joints is None or gripper is None:
        raise RequestError("observation", "the observation has no 'state'; send a vector of floats under that name")
    return np.concatenate([_vector("joint_position", joints), _vector("gripper_position", gripper)])


def _is_picture(key: str, value: Any) -> bool:
    return key.startswith("observation") and isinstance(value, np.ndarray) and value.ndim == 3


def _short(name: str) -> str:
    return name.removeprefix("observation.images.").removeprefix("observation/")


def _picture(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.ndim != 3:
        raise RequestError("observation", f"picture '{name}' is not an array of height x width x 3")
    if value.shape[2] != 3 and value.shape[0] == 3:
        value = value.transpose(1, 2, 0)
    if value.shape[2] != 3 or 0 in value.shape:
        raise RequestError("observation", f"picture '{name}' has shape {value.shape}; send height x width x 3 RGB")
    if value.dtype != np.uint8 and value.dtype.kind != "f":
        raise RequestError("observation", f"picture '{name}' is {value.dtype}; send uint8 0..255")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise RequestError("observation", f"picture '{name}' holds NaN or infinity")
    return np.ascontiguousarray(value)


def _vector(name: str, value: Any) -> np.ndarray:
    try:
        vector: np.ndarray = np.asarray(value, np.float32).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError("observation", f"'{name}' is not a vector of floats") from error
    if not np.isfinite(vector).all():
        where = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise RequestError("observation", f"'{name}' holds NaN or infinity at index {where}; check that sensor")
    return vector


def _noise(message: dict[str, Any]) -> np.ndarray | None:
    noise = message.get("noise")
    if noise is None:
        return None
    if not isinstance(noise, np.ndarray) or noise.dtype.kind != "f" or not np.isfinite(noise).all():
        raise RequestError("observation", "'noise' is not an array of finite floats [horizon, action width]")
    return noise.astype(np.float32)


def _previous(message: dict[str, Any]) -> Previous | None:
    given = message.get("previous")
    if given is None:
        return None
    if not isinstance(given, dict) or not {"actions"} <= set(given) <= {"actions", "delay", "horizon", "schedule"}:
        raise RequestError("bad_request", "'previous' is a map of 'actions', 'delay', 'horizon' and 'schedule'")
    actions = given["actions"]
    if not isinstance(actions, np.ndarray) or actions.dtype.kind != "f":
        raise RequestError("bad_request", "'previous.actions' is not an array of floats [n, action width]")
    schedule = _name(given, "schedule") or "LINEAR"
    return Previous(actions.astype(np.float32), _whole(given, "delay") or 0, _whole(given, "horizon"), schedule)


def _number(message: dict[str, Any], key: str) -> float | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
        raise RequestError("bad_request", f"'{key}' is not a finite number")
    return float(value)


def _deadline(message: dict[str, Any]) -> float | None:
    deadline = _number(message, "deadline_ms")
    if deadline is not None and deadline <= 0:
        raise RequestError("bad_request", "'deadline_ms' counts from the arrival of the request and must be positive")
    return deadline


def _whole(message: dict[str, Any], key: str) -> int | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
        raise RequestError("bad_request", f"'{key}' is not a whole number from 0 to 2^63 - 1")
    return int(value)


def _name(message: dict[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_NAME):
        raise RequestError("bad_request", f"'{key}' is not a text of 1 to {MAX_NAME} characters")
    return value


def _identifier(message: dict[str, Any], key: str) -> str | int | None:
    value = message.get(key)
    return _name(message, key) if isinstance(value, str) else _whole(message, key)
