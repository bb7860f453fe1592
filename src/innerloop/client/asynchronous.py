"""The remote policy for asyncio: many requests may be under way at once on one connection."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from innerloop.client.packing import keep_large_blocks
from innerloop.client.remote import CLOSE_SECONDS, FINAL_CODES
from innerloop.client.wire import (
    CLOSED,
    PROTOCOL,
    UNCONNECTED,
    ConnectionFailed,
    Continued,
    RemoteChunk,
    RemoteError,
    continued,
    headers,
    names_its_answers,
    read_answer,
    read_greeting,
    waits,
    worth_trying_again,
    write_request,
)

log = logging.getLogger(__name__)


class AsyncRemotePolicy:
    """A policy served at `url` (ws:// or wss://). Connects at the first request, and again after a break.

    `patience`: seconds to keep trying to connect, to wait for a warm server and for one answer.
    """

    def __init__(
        self, url: str, *, token: str | None = None, session: str | None = None, patience: float = 60.0
    ) -> None:
        keep_large_blocks()
        self._url = url
        self._token = token
        self._session = session
        self._patience = patience
        self._socket: ClientConnection | None = None
        self._metadata: dict[str, Any] = {}
        self._tag = 0
        self._waiting: dict[int, asyncio.Future[RemoteChunk | None]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server said about the policy when this client last connected; empty before."""
        return self._metadata

    async def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        session: str | None = None,
        episode: str | int | None = None,
        deadline_ms: float | None = None,
        previous: Continued | None = None,
    ) -> RemoteChunk:
        """One decision. Raises RemoteError with the server's code, ConnectionFailed when it cannot be reached."""
        options = {"noise": noise, "seed": seed, "session": session or self._session, "episode": episode}
        extra = {"deadline_ms": deadline_ms, "previous": continued(previous), "timestamp": time.time()}
        answer = await self._ask(observation, {**options, **extra})
        if answer is None:
            raise RemoteError("protocol", "the server answered an observation without actions")
        return answer

    async def reset(self, session: str | None = None, episode: str | int | None = None) -> None:
        """Begin a new episode: the server forgets the old one, and older answers are stale."""
        await self._ask({"reset": {"session": session or self._session, "episode": episode}}, {})

    async def connect(self) -> dict[str, Any]:
        """Connect and wait for a warm server; returns its metadata."""
        async with self._connecting:
            if self._closed:
                raise ConnectionFailed(CLOSED)
            if self._socket is None:
                await self._open(time.monotonic() + self._patience)
        return self._metadata

    async def close(self) -> None:
        """Leave the server, for good; its work for this client ends, and calls under way raise ConnectionFailed."""
        self._closed = True
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader

    async def __aenter__(self) -> "AsyncRemotePolicy":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, content: Mapping[str, Any], options: dict[str, Any]) -> RemoteChunk | None:
        until = time.monotonic() + self._patience
        while True:
            await self.connect()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    return await self._exchange(content, options)
            except ConnectionClosed as error:
                self._socket = None
                if error.rcvd is not None and error.rcvd.code in FINAL_CODES:
                    raise RemoteError("refused", f"the server closed the connection: {error.rcvd.reason}") from error
            except TimeoutError as error:
                raise RemoteError("timeout", f"no answer within {self._patience:g} s") from error

    async def _exchange(self, content: Mapping[str, Any], options: dict[str, Any]) -> RemoteChunk | None:
        socket = self._socket
        assert socket is not None
        self._tag += 1
        tag = self._tag
        answer: asyncio.Future[RemoteChunk | None] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = answer
        try:
            await socket.send(write_request(content, id=tag, **options))
            return await answer
        finally:
            self._waiting.pop(tag, None)
            if answer.cancelled() and not names_its_answers(self._metadata):
                self._socket = None  # the answer may still come, and would be taken for the next one's
                socket.transport.abort()

    async def _read(self, socket: ClientConnection) -> None:
        try:
            while True:
                tag, answer = read_answer(await socket.recv())
                if tag is None and len(self._waiting) == 1:  # openpi's own server returns no id
                    tag = next(iter(self._waiting))
                waiting = self._waiting.get(tag)
                if waiting is None or waiting.done():
                    continue  # of a request that this client gave up
                if isinstance(answer, RemoteError):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except ConnectionClosed as error:
            if self._socket is socket:
                self._socket = None
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)

    async def _open(self, until: float) -> None:
        for wait in waits():
            try:
                socket, self._metadata = await self._greet(until)
                if self._closed:
                    socket.transport.abort()
                    raise ConnectionFailed(CLOSED)
                self._socket = socket
                self._reader = asyncio.create_task(self._read(socket))
                return
            except UNCONNECTED as error:
                reason = worth_trying_again(self._url, error)
            if time.monotonic() + wait > until:
                raise ConnectionFailed(f"{self._url} could not be reached within {self._patience:g} s ({reason})")
            log.warning("%s cannot be reached (%s); trying again in %.1f s", self._url, reason, wait)
            await asyncio.sleep(wait)

    async def _greet(self, until: float) -> tuple[ClientConnection, dict[str, Any]]:
        socket = await connect(
            self._url,
            subprotocols=[Subprotocol(PROTOCOL)],
            compression=None,
            max_size=None,
            additional_headers=headers(self._token),
            open_timeout=max(0.1, min(10.0, until - time.monotonic())),
            close_timeout=CLOSE_SECONDS,
            ping_timeout=60,
            user_agent_header=None,
        )
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                metadata = read_greeting(await socket.recv())
                if metadata is None:
                    log.warning("%s is there and loads its policy; waiting for it", self._url)
                while metadata is None:
                    metadata = read_greeting(await socket.recv())
                return socket, metadata
        except BaseException:  # a connection that is not used holds one of the server's places
            socket.transport.abort()
            raise
