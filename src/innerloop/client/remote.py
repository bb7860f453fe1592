"""A policy somewhere else: the two methods of a local policy, over a websocket that comes back when it breaks."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from innerloop.client.packing import keep_large_blocks
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
CLOSE_SECONDS = 2.0  # that a server has to say goodbye
FINAL_CODES = {1002, 1003, 1007, 1008, 1009}  # closes that sending again cannot mend


class RemotePolicy:
    """A policy served at `url` (ws:// or wss://), for one thread at a time; others wait their turn.

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
        self._lock = threading.Lock()
        self._socket: ClientConnection | None = None
        self._metadata: dict[str, Any] = {}
        self._tag = 0
        self._closed = False
        self._connect(time.monotonic() + patience)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server said about the policy when this client last connected."""
        return self._metadata

    def infer(
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
        answer = self._ask(
            observation,
            {**options, "deadline_ms": deadline_ms, "previous": continued(previous), "timestamp": time.time()},
        )
        if answer is None:
            raise RemoteError("protocol", "the server answered an observation without actions")
        return answer

    def reset(self, session: str | None = None, episode: str | int | None = None) -> None:
        """Begin a new episode: the server forgets the old one, and older answers are stale."""
        self._ask({"reset": {"session": session or self._session, "episode": episode}}, {})

    def close(self) -> None:
        """Leave the server, for good; its work for this client ends, and a call under way raises ConnectionFailed."""
        self._closed = True
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def __enter__(self) -> "RemotePolicy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, content: Mapping[str, Any], options: dict[str, Any]) -> RemoteChunk | None:
        with self._lock:
            self._tag += 1
            message = write_request(content, id=self._tag, **options)
            until = time.monotonic() + self._patience
            while True:
                try:
                    return self._exchange(message, until)
                except ConnectionClosed as error:
                    if error.rcvd is not None and error.rcvd.code in FINAL_CODES:
                        self._socket = None
                        raise RemoteError(
                            "refused", f"the server closed the connection: {error.rcvd.reason}"
                        ) from error
                except OSError:
                    pass
                self._socket = None
                self._connect(until)

    def _exchange(self, message: bytes, until: float) -> RemoteChunk | None:
        if self._socket is None:
            self._connect(until)
        socket = self._socket
        if self._closed or socket is None:
            self.close()
            raise ConnectionFailed(CLOSED)
        socket.send(message)
        while True:
            try:
                tag, answer = read_answer(socket.recv(timeout=max(0.0, until - time.monotonic())))
            except TimeoutError as error:
                if not names_its_answers(self._metadata):  # it may still come, and would be taken for the next one's
                    self._socket = None
                    socket.close()
                raise RemoteError("timeout", f"no answer within {self._patience:g} s") from error
            if tag not in (self._tag, None):
                continue  # of a request that this client gave up
            if isinstance(answer, RemoteError):
                raise answer
            return answer

    def _connect(self, until: float) -> None:
        for wait in waits():
            if self._closed:
                raise ConnectionFailed(CLOSED)
            try:
                self._socket, self._metadata = self._greet(until)
            except UNCONNECTED as error:
                reason = worth_trying_again(self._url, error)
            else:
                return
            if time.monotonic() + wait > until:
                raise ConnectionFailed(f"{self._url} could not be reached within {self._patience:g} s ({reason})")
            log.warning("%s cannot be reached (%s); trying again in %.1f s", self._url, reason, wait)
            time.sleep(wait)

    def _greet(self, until: float) -> tuple[ClientConnection, dict[str, Any]]:
        socket = connect(
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
        socket.__enter__()  # closed by `close`; websockets 17 warns about connections used without a `with`
        try:
            metadata = read_greeting(socket.recv(timeout=max(0.0, until - time.monotonic())))
            if metadata is None:
                log.warning("%s is there and loads its policy; waiting for it", self._url)
            while metadata is None:
                metadata = read_greeting(socket.recv(timeout=max(0.0, until - time.monotonic())))
            return socket, metadata
        except BaseException:  # a connection that is not used holds one of the server's places
            socket.close()
            raise
