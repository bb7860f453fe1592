"""openpi's protocol: a websocket with msgpack, metadata on connect, compression off.

Stock clients see what openpi's own server sends. Clients that offer the subprotocol `innerloop.v1` are also
told the server's state while they wait. Protocol: src/openpi/serving/websocket_policy_server.py of openpi.
"""

import asyncio
import json
import logging
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from innerloop.client.packing import MessageError, pack, unpack
from innerloop.client.wire import PROTOCOL
from innerloop.serve.access import Rate
from innerloop.serve.protocol import Reply, RequestError, read_request, write_error, write_reply
from innerloop.serve.truth import Truth
from innerloop.serve.worker import State, Worker

log = logging.getLogger(__name__)
STATUS_SECONDS = 1.0  # between two status messages of a server that is not ready
OUTBOX = 64  # answers that a client may leave unread before it is cut off


class Connection:
    """One client from greeting to close. Reading, deciding and writing never wait for each other."""

    def __init__(self, socket: ServerConnection, worker: Worker, truth: Truth, rate: float) -> None:
        self._socket = socket
        self._worker = worker
        self._truth = truth
        self._rate = Rate(rate)
        self._client = f"ws-{socket.id}"
        self._outbox: asyncio.Queue[bytes | str] = asyncio.Queue(OUTBOX)
        self._loop = asyncio.get_running_loop()

    async def serve(self, ready: asyncio.Event) -> None:
        """Greet, then answer until the client leaves; its work and sessions end with it."""
        writer = None
        try:
            if not await self._greet(ready):
                return
            writer = asyncio.create_task(self._write())
            async for message in self._socket:
                self._receive(message)
        except ConnectionClosed:
            pass
        finally:
            if writer is not None:
                writer.cancel()
            self._worker.leave(self._client)

    async def flush(self) -> None:
        """Wait until every answer so far is on its way."""
        await self._outbox.join()

    async def _greet(self, ready: asyncio.Event) -> bool:
        closed = asyncio.create_task(self._socket.wait_closed())
        waiting = asyncio.create_task(ready.wait())
        try:
            while not waiting.done() and not closed.done():
                if self._socket.subprotocol == PROTOCOL:
                    await self._socket.send(json.dumps({"status": str(self._worker.state)}))
                await asyncio.wait({closed, waiting}, timeout=STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                return False
        finally:
            closed.cancel()
            waiting.cancel()
        if self._worker.state is State.FAILED:
            await self._socket.close(1011, "the policy could not be made ready; see the server's log")
            return False
        await self._socket.send(pack(self._truth.metadata()))
        return True

    def _receive(self, message: bytes | str) -> None:
        tag, content, unreadable = _read(message)
        try:
            self._rate.spend()
            if unreadable is not None:
                raise unreadable
            if isinstance(content, dict) and "reset" in content:
                self._reset(content, tag)
                return
            self._worker.submit(read_request(content, self._client), self._client, self._deliver)
        except RequestError as error:
            self._send(json.dumps(write_error(error.code, str(error), tag)))

    def _reset(self, content: dict[str, Any], tag: str | int | None) -> None:
        wanted = content["reset"]
        session = wanted.get("session") if isinstance(wanted, dict) else None
        episode = wanted.get("episode") if isinstance(wanted, dict) else None
        if not isinstance(wanted, dict) or not isinstance(session, (str, type(None))):
            raise RequestError("bad_request", "'reset' is a map of 'session' and 'episode'")
        if not isinstance(episode, (str, int, type(None))):
            raise RequestError("bad_request", "'episode' is a text or a whole number")
        done = self._worker.reset(session or self._client, episode)
        answer = pack({"reset": True, "id": tag})
        done.add_done_callback(lambda _: self._soon(answer))

    def _deliver(self, reply: Reply) -> None:
        if reply.chunk is not None:
            self._soon(pack(write_reply(reply)))
        else:
            self._soon(json.dumps(write_error(reply.code, reply.message, reply.request.tag)))

    def _soon(self, answer: bytes | str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, answer)

    def _send(self, answer: bytes | str) -> None:
        try:
            self._outbox.put_nowait(answer)
        except asyncio.QueueFull:
            log.warning("client %s leaves %d answers unread and is cut off", self._client, OUTBOX)
            self._socket.transport.abort()

    async def _write(self) -> None:
        try:
            while True:
                await self._socket.send(await self._outbox.get())
                self._outbox.task_done()
        except ConnectionClosed:
            pass


def _read(message: bytes | str) -> tuple[str | int | None, Any, RequestError | None]:
    """A message's id, its content, and why it has none: a refusal for the rate bears the id as well."""
    if isinstance(message, str):
        return None, None, RequestError("bad_request", "text is not a request; send binary msgpack")
    try:
        content = unpack(message)
    except MessageError as error:
        return None, None, RequestError("bad_request", str(error))
    tag = content.get("id") if isinstance(content, dict) else None
    return (tag if isinstance(tag, (str, int)) else None), content, None
