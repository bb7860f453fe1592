"""The robot's side: a remote policy (blocking or asyncio) and a player of action chunks. Needs no torch."""

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
