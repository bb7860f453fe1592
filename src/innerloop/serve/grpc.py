"""LeRobot's asynchronous inference service, for its stock robot client.

Service and messages: lerobot/transport/services.proto of LeRobot 0.6.1. The client streams observations and
keeps one GetActions call open; the newest observation is decided on, none is filtered for being similar.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import numpy as np

from innerloop.client.packing import MessageError
from innerloop.serve.access import Rate, ServeOptions, bracketed, port_in_use, same_token, token_in
from innerloop.serve.ask import ask
from innerloop.serve.pickles import RemotePolicyConfig, TimedObservation, read_pickle, write_timed_actions
from innerloop.serve.protocol import Request, RequestError, observation
from innerloop.serve.worker import State, Worker

log = logging.getLogger(__name__)
SERVICE = "transport.AsyncInference"
WAIT_SECONDS = 2.0  # how long GetActions waits for an observation before it answers with nothing
GONE_SECONDS = 3.0  # without a GetActions call, which the client otherwise always has open: its session ends
FRAME_RATE = 30.0  # LeRobot's default control rate, Hz
GRACE_SECONDS = 2.0
EMPTY = b""
# gRPC gives all channels of one process the same connection, and the service has no other name for a robot.
SHARED = "another robot uses this connection; run each robot client in a process of its own"
STATUS = {
    "observation": grpc.StatusCode.INVALID_ARGUMENT,
    "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
    "rate": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "draining": grpc.StatusCode.UNAVAILABLE,
}


@dataclass
class Robot:
    """One client connection: its feature layout and the newest observation it sent."""

    rate: Rate
    setup: RemotePolicyConfig | None = None
    latest: TimedObservation | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0  # GetActions under way
    told: bool = False  # that it sends no task
    seen: float = field(default_factory=time.monotonic)


class LeRobotTransport:
    """gRPC on a port of its own, in the server's event loop."""

    def __init__(self, worker: Worker, settled: asyncio.Event, options: ServeOptions) -> None:
        self.port = options.listening_port
        self._worker = worker
        self._settled = settled
        self._options = options
        self._robots: dict[str, Robot] = {}
        self._server: Any = None

    async def start(self) -> None:
        """Bind the port."""
        limits = [
            ("grpc.max_receive_message_length", self._options.max_message),
            ("grpc.max_concurrent_streams", 4 * self._options.max_clients),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # identity alone: nothing can inflate
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(interceptors=[_Gate(self._options.token)], options=limits)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        address = f"{bracketed(self._options.host)}:{self._options.listening_port}"
        try:
            self.port = self._bind(address)
        except RuntimeError:  # whose text tells about gRPC's own logging and nothing else
            why = OSError("the address is in use, or none of this machine's")
            raise port_in_use(self._options.host, self._options.listening_port, why) from None
        await self._server.start()

    async def stop(self) -> None:
        """Let calls in flight end, then unbind."""
        for robot in self._robots.values():
            robot.arrived.set()
        await self._server.stop(GRACE_SECONDS)

    def _bind(self, address: str) -> int:
        if self._options.certificate is None or self._options.private_key is None:
            return int(self._server.add_insecure_port(address))
        pair = (self._options.private_key.read_bytes(), self._options.certificate.read_bytes())
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials([pair])))

    def _handlers(self) -> dict[str, Any]:
        return {
            "Ready": grpc.unary_unary_rpc_method_handler(self._ready),
            "SendPolicyInstructions": grpc.unary_unary_rpc_method_handler(self._set_up),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self._observe),
            "GetActions": grpc.unary_unary_rpc_method_handler(self._act),
        }

    async def _ready(self, _: bytes, context: Any) -> bytes:
        await self._settled.wait()
        if self._worker.state is State.FAILED:
            await context.abort(grpc.StatusCode.INTERNAL, "the policy could not be made ready; see the server's log")
        peer = context.peer()
        self._prune()
        if peer in self._robots and self._robots[peer].calls:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, SHARED)
        if len(self._robots) >= self._options.max_clients and peer not in self._robots:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._options.max_clients} robots are connected")
        self._robots[peer] = Robot(Rate(self._options.rate))
        await asyncio.wrap_future(self._worker.reset(peer))
        return EMPTY

    async def _set_up(self, message: bytes, context: Any) -> bytes:
        robot = await self._robot(context)
        try:
            setup = await asyncio.to_thread(read_pickle, _field(message, 1))
            if not isinstance(setup, RemotePolicyConfig):
                raise MessageError("SendPolicyInstructions carries a RemotePolicyConfig")
            _check_setup(setup, self._worker)
        except (MessageError, RequestError) as error:
            await _refuse(context, error)
        robot.setup = setup
        log.info("%s drives with %s; its model path %r is not used: this server's policy is", context.peer(),
                 setup.policy_type, setup.pretrained_name_or_path)  # fmt: skip
        return EMPTY

    async def _observe(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        robot = await self._robot(context)
        try:
            robot.rate.spend()
            message = await asyncio.to_thread(read_pickle, await _assembled(stream, self._options.max_message))
            if not isinstance(message, TimedObservation):
                raise MessageError("SendObservations carries a TimedObservation")
            _check_observation(message)
        except (MessageError, RequestError) as error:
            await _refuse(context, error)
        robot.latest = message
        robot.arrived.set()
        return EMPTY

    async def _act(self, _: bytes, context: Any) -> bytes:
        robot = await self._robot(context)
        if robot.calls:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, SHARED)
        robot.calls += 1
        try:
            return await self._next(robot, context)
        except asyncio.CancelledError:
            self._forget(context.peer(), robot)
            raise
        finally:
            robot.calls -= 1
            asyncio.get_running_loop().call_later(GONE_SECONDS, self._end_if_silent, context.peer(), robot)

    async def _next(self, robot: Robot, context: Any) -> bytes:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await robot.arrived.wait()
        except TimeoutError:
            return EMPTY
        robot.arrived.clear()
        seen, setup = robot.latest, robot.setup
        if seen is None or setup is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no policy instructions; restart the robot client")
        assert seen is not None
        assert setup is not None
        peer = context.peer()
        try:
            request = Request(lerobot_observation(seen.observation, setup), peer)
            if not request.observation["prompt"] and not robot.told:
                robot.told = True
                log.warning("%s sends no task, so the policy decides without one: start its client with --task", peer)
            reply = await ask(self._worker, request, peer)
        except RequestError as error:
            await _refuse(context, error)
        if reply.chunk is None:
            await _refuse(context, RequestError(reply.code, reply.message))
        assert reply.chunk is not None
        actions = reply.chunk.actions[: setup.actions_per_chunk]
        return _message(1, write_timed_actions(actions, seen.timestamp, seen.timestep, 1 / FRAME_RATE))

    async def _robot(self, context: Any) -> Robot:
        robot = self._robots.get(context.peer())
        if robot is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "call Ready first; restart the robot client")
        assert robot is not None
        robot.seen = time.monotonic()
        return robot

    def _end_if_silent(self, peer: str, robot: Robot) -> None:
        """A robot that leaves between two calls leaves no trace but its silence; it may still come back."""
        if not robot.calls and time.monotonic() - robot.seen >= GONE_SECONDS / 2:
            self._worker.leave(peer)

    def _prune(self) -> None:
        full = len(self._robots) >= self._options.max_clients
        limit = time.monotonic() - (GONE_SECONDS if full else self._options.session_timeout)
        for peer, robot in list(self._robots.items()):
            if not robot.calls and robot.seen < limit:
                self._forget(peer, robot)

    def _forget(self, peer: str, robot: Robot) -> None:
        """A GetActions call was cut: the robot is gone, unless it has come back meanwhile."""
        if self._robots.get(peer) is robot:
            del self._robots[peer]
            self._worker.leave(peer)


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the token in a call's metadata before its handler sees a message."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The handler of an allowed call, or one that only refuses."""
        given = dict(details.invocation_metadata or ()).get("authorization")
        if same_token(self._token, token_in(given)):
            return await continuation(details)

        async def refuse(_: Any, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the metadata 'authorization: Bearer <token>'")
            return EMPTY

        if details.method.endswith("/SendObservations"):
            return grpc.stream_unary_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


def lerobot_observation(raw: Mapping[str, Any], setup: RemotePolicyConfig) -> dict[str, Any]:
    """Motors in the order of the features' names as `state`, pictures under their camera's name, `task` as prompt.

    Raises RequestError that names the motor or camera that is missing.
    """
    names: list[str] = []
    images: dict[str, Any] = {}
    for key, feature in setup.lerobot_features.items():
        if key.startswith("observation.images."):
            camera = key.removeprefix("observation.images.")
            images[setup.rename_map.get(key, camera).removeprefix("observation.images.")] = _given(raw, camera)
        elif key == "observation.state":
            names = [str(name) for name in feature.get("names") or ()]
    return observation(images, [_given(raw, name) for name in names], raw.get("task", ""))


def _given(raw: Mapping[str, Any], name: str) -> Any:
    if name not in raw:
        raise RequestError("observation", f"the observation has no '{name}', which the robot's features promise")
    return raw[name]


def _check_setup(setup: RemotePolicyConfig, worker: Worker) -> None:
    if not isinstance(setup.lerobot_features, dict) or not isinstance(setup.rename_map, dict):
        raise RequestError("bad_request", "the features or the renames of the policy instructions are not a map")
    if any(not isinstance(feature, dict) for feature in setup.lerobot_features.values()):
        raise RequestError("bad_request", "a feature of the policy instructions is not a map")
    if type(setup.actions_per_chunk) is not int or setup.actions_per_chunk < 1:
        raise RequestError("bad_request", "actions_per_chunk is not a positive whole number")
    family = worker.policy.metadata.get("policy") if worker.policy is not None else None
    if family is not None and setup.policy_type != family:
        raise RequestError(
            "bad_request",
            f"the robot asks for policy type '{setup.policy_type}' and this server has '{family}'; "
            f"start the robot client with --policy_type={family}",
        )


def _check_observation(message: TimedObservation) -> None:
    if not isinstance(message.observation, dict):
        raise RequestError("observation", "the observation is not a map")
    if type(message.timestep) is not int or not -(2**62) < message.timestep < 2**62:
        raise RequestError("bad_request", "the observation's timestep is not a whole number")
    if not isinstance(message.timestamp, (int, float)) or not np.isfinite(message.timestamp):
        raise RequestError("bad_request", "the observation's timestamp is not a finite number")


async def _refuse(context: Any, error: MessageError | RequestError) -> NoReturn:
    code = error.code if isinstance(error, RequestError) else "bad_request"
    await context.abort(STATUS.get(code, grpc.StatusCode.ABORTED), f"{code}: {error}"[:2000])
    raise error


async def _assembled(stream: AsyncIterator[bytes], largest: int) -> bytes:
    """The data of a stream of `Observation` messages (field 2), joined. Raises RequestError when it grows too large."""
    parts: list[bytes] = []
    size = 0
    async for message in stream:
        part = _field(message, 2)
        size += len(part)
        if size > largest:
            raise RequestError("bad_request", f"the observation is larger than {largest} bytes")
        parts.append(part)
    return b"".join(parts)


def _field(message: bytes, number: int) -> bytes:
    """One bytes field of a protobuf message whose other fields are numbers. Raises MessageError."""
    position, found = 0, b""
    while position < len(message):
        tag, position = _varint(message, position)
        value, position = _varint(message, position)
        if tag & 7 == 0:
            continue
        if tag & 7 != 2 or position + value > len(message):
            raise MessageError("the message is not the protobuf that this service defines")
        if tag >> 3 == number:
            found = message[position : position + value]
        position += value
    return found


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(message):
            raise MessageError("the protobuf message is truncated")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MessageError("the protobuf message has a number of more than 64 bits")


def _message(number: int, data: bytes) -> bytes:
    """A protobuf message of one bytes field."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + data
