"""Observations as messages: a JSON header, then the arrays, frames plain or as JPEG."""

import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from innerloop.contract import InnerloopError
from innerloop.process import jpeg

_LENGTH = struct.Struct("<I")
_QUALITY = 90


@dataclass(frozen=True)
class Message:
    """name: "raw" frames as their bytes, or "jpeg"."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ("raw", "jpeg"):
            raise InnerloopError(f"frames cannot travel as '{self.name}'; choose raw or jpeg")

    def pack(self, observation: Mapping[str, Any]) -> bytes:
        """The message a client sends."""
        frames = {name: np.ascontiguousarray(frame) for name, frame in observation["images"].items()}
        bodies = [self._encode(frame) for frame in frames.values()]
        state = np.asarray(observation["state"], dtype="<f4")
        header = {
            "prompt": observation["prompt"],
            "state": state.size,
            "frames": [
                [name, list(frame.shape), len(body)] for (name, frame), body in zip(frames.items(), bodies, strict=True)
            ],
        }
        text = json.dumps(header).encode()
        return b"".join([_LENGTH.pack(len(text)), text, state.tobytes(), *bodies])

    def unpack(self, message: bytes) -> dict[str, Any]:
        """The observation in a message."""
        (length,) = _LENGTH.unpack_from(message)
        start = _LENGTH.size + length
        header = json.loads(message[_LENGTH.size : start])
        state = np.frombuffer(message, dtype="<f4", count=header["state"], offset=start)
        start += state.nbytes
        body, bodies = memoryview(message), {}
        for name, _, size in header["frames"]:
            bodies[name] = body[start : start + size]
            start += size
        if self.name == "jpeg":
            return {"images": jpeg.decode(bodies), "state": state, "prompt": header["prompt"]}
        images = {
            name: np.frombuffer(bodies[name], dtype=np.uint8).reshape(shape) for name, shape, _ in header["frames"]
        }
        return {"images": images, "state": state, "prompt": header["prompt"]}

    def _encode(self, frame: np.ndarray) -> bytes:
        if self.name == "raw":
            return frame.tobytes()
        file = io.BytesIO()
        Image.fromarray(frame).save(file, format="JPEG", quality=_QUALITY)
        return file.getvalue()
