"""GR00T's protocol: ZeroMQ REQ clients with msgpack, arrays as .npy.

Messages: gr00t/policy/server_client.py and gr00t/data/types.py of NVIDIA/Isaac-GR00T. A ROUTER socket speaks
to many of them at once, so one robot's decision never blocks another's ping.
"""

import ast
import asyncio
import io
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq
import zmq.asyncio

from innerloop.client.packing import MAX_ITEMS, MAX_TEXT, MessageError, array_dtype, array_from
from innerloop.serve.access import Rate, ServeOptions, bracketed, port_in_use, same_token
from innerloop.serve.ask import ask
from innerloop.serve.protocol import Request, RequestError, observation
from innerloop.serve.worker import State, Worker

log = logging.getLogger(__name__)
LIMITS = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS, "max_str_len": MAX_TEXT, "max_ext_len": 0}
HEARTBEAT_MS = 10_000
LINGER_MS = 1000
SILENT_SECONDS = 10.0  # after which a peer makes room for new ones; ZeroMQ does not say who hung up
QUEUE = 16  # messages held for one client; a REQ socket never has more than one


@dataclass
class Peer:
    """One REQ socket; `seen` on the monotonic clock."""

    rate: Rate
    seen: float = field(default_factory=time.monotonic)


class GrootTransport:
    """ZeroMQ on a port of its own, in the server's event loop."""

    def __init__(self, worker: Worker, settled: asyncio.Event, options: ServeOptions) -> None:
        self.port = options.listening_port
        self._worker = worker
        self._settled = settled
        self._options = options
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._reader: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._peers: dict[bytes, Peer] = {}  # longest silent first

    async def start(self) -> None:
        """Bind the port."""
        socket = self._socket
        socket.setsockopt(zmq.MAXMSGSIZE, self._options.max_message)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a vanished client is an error, not silence
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if ":" in self._options.host:
            socket.setsockopt(zmq.IPV6, 1)
        port = self._options.listening_port
        try:
            socket.bind(f"tcp://{bracketed(self._options.host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise port_in_use(self._options.host, port, error) from error
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """Let answers in flight out, then unbind."""
        if self._reader is not None:
            self._reader.cancel()
        if self._answers:
            await asyncio.wait(self._answers, timeout=LINGER_MS / 1000)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or frames[1] != b"":
                log.warning("a message that no REQ socket sends was dropped")
                continue
            task = asyncio.create_task(self._serve(frames[0], frames[2]))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _serve(self, identity: bytes, message: bytes) -> None:
        client = _client(identity)
        try:
            self._meet(identity).spend()
            answer = await self._answer(client, message)
        except (MessageError, RequestError) as error:
            code = error.code if isinstance(error, RequestError) else "bad_request"
            answer = {"error": f"{code}: {error}"}
        try:
            await self._socket.send_multipart([identity, b"", encode(answer)])
        except zmq.ZMQError:  # EHOSTUNREACH: nobody waits for this answer any more
            self._forget(identity)

    def _meet(self, identity: bytes) -> Rate:
        """The rate of a peer; a new one may end the session of one that has long been silent."""
        peer = self._peers.pop(identity, None)
        if peer is None:
            peer = Peer(Rate(self._options.rate))
            oldest = next(iter(self._peers), None)
            crowded = len(self._peers) >= self._options.max_clients // 2
            if oldest is not None and crowded and time.monotonic() - self._peers[oldest].seen > SILENT_SECONDS:
                self._forget(oldest)
        peer.seen = time.monotonic()
        self._peers[identity] = peer
        return peer.rate

    def _forget(self, identity: bytes) -> None:
        self._peers.pop(identity, None)
        self._worker.leave(_client(identity))

    async def _answer(self, client: str, message: bytes) -> Any:
        endpoint, token = read_head(message)
        if not same_token(self._options.token, token):
            raise RequestError("unauthorized", "the api_token is missing or wrong; give the client the server's token")
        if endpoint == "ping":
            return {"status": "ok", "message": f"server is {self._worker.state}"}
        if endpoint == "kill":
            raise RequestError("refused", "clients cannot stop this server; send SIGTERM to its process")
        await self._settled.wait()
        if self._worker.state is State.FAILED:
            raise RequestError("failed", "the policy could not be made ready; see the server's log")
        if endpoint == "get_modality_config":
            return modality_config(self._metadata())
        data = decode(message).get("data") or {}
        if not isinstance(data, dict):
            raise RequestError("bad_request", "'data' is not a map")
        if endpoint == "reset":
            mine = [session.name for session in self._worker.sessions() if client in session.clients]
            await asyncio.gather(*(asyncio.wrap_future(self._worker.reset(name)) for name in mine))
            return {}
        if endpoint == "get_action":
            return await self._act(client, data)
        raise RequestError("bad_request", f"unknown endpoint '{endpoint}'")

    async def _act(self, client: str, data: dict[str, Any]) -> list[Any]:
        given = data.get("observation")
        options = data.get("options") or {}
        if not isinstance(given, dict) or not isinstance(options, dict):
            raise RequestError("bad_request", "'observation' or 'options' is not a map")
        flat = any(key.startswith(("video.", "state.")) for key in given if isinstance(key, str))
        rows = groot_observations(nested(given) if flat else given, self._metadata())
        seed = options.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise RequestError("bad_request", "'seed' is not a whole number from 0 to 2^63 - 1")
        names = [client if len(rows) == 1 else f"{client}/{row}" for row in range(len(rows))]
        requests = [Request(row, name, seed=seed) for row, name in zip(rows, names, strict=True)]
        replies = await asyncio.gather(*(ask(self._worker, request, client) for request in requests))
        for reply in replies:
            if reply.chunk is None:
                raise RequestError(reply.code, reply.message)
        actions = np.stack([reply.chunk.actions for reply in replies if reply.chunk is not None])
        info = {"server_timing": dict(replies[0].server_timing), "weights_version": replies[0].weights_version}
        prefix = "action." if flat else ""
        return [groot_actions(actions.astype(np.float32), self._metadata(), prefix), info]

    def _metadata(self) -> Mapping[str, Any]:
        return self._worker.policy.metadata if self._worker.policy is not None else {}


def _client(identity: bytes) -> str:
    return f"zmq-{identity.hex()}"


def read_head(message: bytes) -> tuple[str, str | None]:
    """Endpoint and token of a request; everything else in it is skipped, not built. Raises MessageError."""
    endpoint, token = "get_action", None
    try:
        reader = msgpack.Unpacker(max_buffer_size=len(message) + 1, **LIMITS)
        reader.feed(message)
        for _ in range(reader.read_map_header()):
            key = reader.unpack()
            if key == "endpoint":
                endpoint = reader.unpack()
            elif key == "api_token":
                token = reader.unpack()
            else:
                reader.skip()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"the message is not a msgpack map: {error}") from error
    if not isinstance(endpoint, str) or not isinstance(token, (str, type(None))):
        raise MessageError("'endpoint' and 'api_token' are texts")
    return endpoint, token


def decode(message: bytes) -> dict[str, Any]:
    """A whole request with its arrays. Raises MessageError."""
    try:
        content = msgpack.unpackb(message, object_hook=_array_from_npy, **LIMITS)
    except MessageError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"the message is not msgpack that this protocol allows: {error}") from error
    return dict(content)


def encode(answer: Any) -> bytes:
    """An answer with its arrays as .npy, as GR00T's client reads them."""
    return bytes(msgpack.packb(answer, default=_npy_from_array))


def groot_observations(given: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"video": {cam: [B,1,H,W,3]}, "state": {key: [B,1,D]}, "language": {key: [[text]] * B}} as B observations.

    States are joined in the order of the metadata's `state_groups`, else in the order sent. Raises RequestError.
    """
    video, state, language = (given.get(name) for name in ("video", "state", "language"))
    if not isinstance(video, dict) or not isinstance(state, dict) or not isinstance(language, dict):
        raise RequestError("observation", "an observation has the maps 'video', 'state' and 'language'")
    keys = list(metadata.get("state_groups", state))
    missing = [key for key in keys if key not in state]
    if missing:
        raise RequestError("observation", f"the state has no '{missing[0]}'; this policy expects {', '.join(keys)}")
    pictures = {str(name): _stack("video." + str(name), value, 5) for name, value in video.items()}
    states = [_stack("state." + str(key), state[key], 3) for key in keys]
    texts = _texts(language)
    sizes = {len(texts), *(len(part) for part in (*pictures.values(), *states))}
    if len(sizes) != 1:
        raise RequestError("observation", f"video, state and language disagree about the batch: {sorted(sizes)}")
    return [
        observation(
            {name: picture[row, -1] for name, picture in pictures.items()},
            np.concatenate([part[row, -1] for part in states]) if states else [],
            texts[row],
        )
        for row in range(sizes.pop())
    ]


def nested(flat: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """The flat keys of GR00T's simulation clients (`video.cam`, `state.arm`, `annotation.…`) as three maps."""
    out: dict[str, dict[str, Any]] = {"video": {}, "state": {}, "language": {}}
    for key, value in flat.items():
        kind, _, name = str(key).partition(".")
        if kind in ("video", "state"):
            out[kind][name] = value
        elif isinstance(value, (list, tuple)):
            out["language"][str(key)] = [item if isinstance(item, list) else [item] for item in value]
    return out


def groot_actions(actions: np.ndarray, metadata: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """[B, T, dim] cut into the metadata's `action_groups` (name -> width); one group `action` where it has none."""
    groups = metadata.get("action_groups") or {"action": actions.shape[-1]}
    edges = np.cumsum([0, *groups.values()])
    return {
        f"{prefix}{name}": np.ascontiguousarray(actions[..., start:end])
        for name, start, end in zip(groups, edges[:-1], edges[1:], strict=True)
    }


def modality_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the policy expects, in the form of GR00T's ModalityConfig."""
    horizon = int(metadata.get("horizon", 1))
    keys = {
        "video": list(metadata.get("cameras", ())),
        "state": list(metadata.get("state_groups", ("state",))),
        "action": list(metadata.get("action_groups", ("action",))),
        "language": ["annotation.human.task_description"],
    }
    return {
        name: {
            "__ModalityConfig_class__": True,
            "as_json": {
                "delta_indices": list(range(horizon)) if name == "action" else [0],
                "modality_keys": names,
                "sin_cos_embedding_keys": None,
                "mean_std_embedding_keys": None,
                "action_configs": None,
            },
        }
        for name, names in keys.items()
    }


def _stack(name: str, value: Any, dimensions: int) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.ndim != dimensions or value.shape[1] != 1:
        shape = "[B, 1, height, width, 3]" if dimensions == 5 else "[B, 1, width]"
        raise RequestError("observation", f"'{name}' is not an array {shape}")
    return value


def _texts(language: Mapping[str, Any]) -> list[Any]:
    rows = next(iter(language.values()), None)
    if (
        len(language) != 1
        or not isinstance(rows, list)
        or any(not isinstance(row, list) or len(row) != 1 for row in rows)
    ):
        raise RequestError("observation", "'language' is one key with [[text]] for each robot")
    return [row[0] for row in rows]


def _array_from_npy(value: dict[Any, Any]) -> Any:
    if "__ndarray_class__" not in value:
        return value
    data = value.get("as_npy")
    if not isinstance(data, bytes) or data[:6] != b"\x93NUMPY" or len(data) < 12:
        raise MessageError("an array is not a .npy file")
    wide = data[6] >= 2
    start = 12 if wide else 10
    length = int.from_bytes(data[8:start], "little")
    if length > 4096 or start + length > len(data):
        raise MessageError("an array's .npy header is damaged")
    try:
        header = ast.literal_eval(data[start : start + length].decode("latin-1").strip())
        dtype, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        raise MessageError("an array's .npy header is damaged") from error
    body = data[start + length :]
    if fortran:
        return array_from(body, array_dtype(dtype), tuple(reversed(shape))).transpose()
    return array_from(body, array_dtype(dtype), shape)


def _npy_from_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or math.prod(value.shape) == 0:
        raise TypeError(f"{type(value).__name__} cannot be sent")
    out = io.BytesIO()
    np.save(out, value, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": out.getvalue()}
