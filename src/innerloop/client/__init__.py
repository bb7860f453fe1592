"""The robot's side: a remote policy (blocking or asyncio) and a player of action chunks. Needs no torch."""

try:
    import msgpack as _msgpack  # type: ignore[import-untyped]  # noqa: F401
    import websockets as _websockets  # noqa: F401
except ModuleNotFoundError as error:
    needed = f"innerloop.client needs the package {error.name}: pip install 'innerloop[client]'"
    raise ModuleNotFoundError(needed, name=error.name) from None

from innerloop.client.asynchronous import AsyncRemotePolicy
from innerloop.client.packing import MessageError
from innerloop.client.player import ChunkPlayer
from innerloop.client.remote import RemotePolicy
from innerloop.client.wire import ConnectionFailed, Previous, RemoteChunk, RemoteError

__all__ = [
    "AsyncRemotePolicy",
    "ChunkPlayer",
    "ConnectionFailed",
    "MessageError",
    "Previous",
    "RemoteChunk",
    "RemoteError",
    "RemotePolicy",
]
