"""Requests and answers of the remote policy as messages, and the errors they can carry."""

import json
import random
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from innerloop.client.packing import MessageError, pack, unpack

PROTOCOL = "innerloop.v1"  # websocket subprotocol of clients that understand status messages
UNCONNECTED = (InvalidURI, ValueError, OSError, ConnectionClosed, InvalidHandshake)
FINAL_STATUS = {400, 401, 403, 404}
CLOSED = "this client was closed; make another"
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts to connect


class RemoteError(RuntimeError):
    """The server refused a request. `code`: late, superseded, stale, busy, rate, observation, non_finite, failed, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ConnectionFailed(RemoteError):
    """The server could not be reached, or not again, within the patience of the client."""

    def __init__(self, message: str) -> None:
        super().__init__("connection", message)


@dataclass(frozen=True)
class RemoteChunk:
    """actions: float32 [horizon, action_dim] in robot units; normalized: the same before un-normalisation.

    timing: ms by stage, with the server's queue_ms, infer_ms and total_ms; receipt: what really ran, as plain data.
    """

    actions: np.ndarray
    normalized: np.ndarray
    timing: dict[str, float] = field(default_factory=dict)
    receipt: dict[str, Any] | None = None
    weights_version: int = 0
    episode: str | int | None = None
    timestamp: float | None = None


class Continued(Protocol):
    """What real-time chunking continues: `Previous` below, or innerloop.Previous where torch is installed."""

    @property
    def actions(self) -> np.ndarray:
        """float [n, action_dim] in robot units: what is not executed yet, row 0 due now."""
        ...

    @property
    def delay(self) -> int:
        """Control steps that will pass before the new chunk can act."""
        ...

    @property
    def horizon(self) -> int | None:
        """Rows that pull at all; all of them by default."""
        ...

    @property
    def schedule(self) -> str:
        """LINEAR, EXP, ONES or ZEROS; PREFIX for policies trained to be given a prefix."""
        ...


@dataclass(frozen=True)
class Previous:
    """The part of the last chunk that a new one is to continue; see Continued."""

    actions: np.ndarray
    delay: int = 0
    horizon: int | None = None
    schedule: str = "LINEAR"


def continued(previous: Continued | None) -> dict[str, Any] | None:
    """A previous chunk as a message has it."""
    if previous is None:
        return None
    actions = np.asarray(previous.actions, np.float32)
    return {
        "actions": actions,
        "delay": previous.delay,
        "horizon": previous.horizon,
        "schedule": previous.schedule,
    }


def write_request(observation: Mapping[str, Any], **options: Any) -> bytes:
    """An observation with the options that are not None (seed, noise, session, episode, deadline_ms, ...)."""
    return pack({**observation, **{name: value for name, value in options.items() if value is not None}})


def read_answer(message: bytes | str) -> tuple[Any, "RemoteChunk | RemoteError | None"]:
    """The id of an answer, and its chunk, its error, or None for an acknowledged reset."""
    if isinstance(message, str):
        return _read_error(message)
    try:
        content = unpack(message)
    except MessageError as error:
        return None, RemoteError("protocol", f"the server's answer cannot be read: {error}")
    if not isinstance(content, dict):
        return None, RemoteError("protocol", "the server's answer is no map; it is no openpi or innerloop server")
    if "actions" not in content:
        return content.get("id"), None
    chunk = RemoteChunk(
        actions=content["actions"],
        normalized=content.get("actions_normalized", np.empty((0, 0), np.float32)),
        timing={**content.get("policy_timing", {}), **content.get("server_timing", {})},
        receipt=content.get("receipt"),
        weights_version=content.get("weights_version", 0),
        episode=content.get("episode"),
        timestamp=content.get("timestamp"),
    )
    return content.get("id"), chunk


def read_greeting(message: bytes | str) -> dict[str, Any] | None:
    """The server's metadata, or None while it reports that it is not ready. Raises RemoteError."""
    if isinstance(message, bytes):
        try:
            return dict(unpack(message))
        except (ValueError, TypeError) as error:
            raise RemoteError("protocol", f"the greeting is that of no openpi or innerloop server: {error}") from error
    status = _json_object(message)
    if "status" in status:
        return None
    raise RemoteError(str(status.get("error", "protocol")), str(status.get("message", message[:200])))


def names_its_answers(metadata: Mapping[str, Any]) -> bool:
    """Whether a server's answers say which request they belong to; openpi's own server does not."""
    return metadata.get("protocol") == PROTOCOL


def waits() -> Iterator[float]:
    """Seconds to wait before each new attempt: doubling, with jitter so that robots do not return all at once."""
    wait = FIRST_WAIT
    while True:
        yield wait * random.uniform(0.5, 1.0)
        wait = min(2 * wait, LONGEST_WAIT)


def headers(token: str | None) -> dict[str, str] | None:
    """The header that carries a token."""
    return None if token is None else {"Authorization": f"Bearer {token}"}


def worth_trying_again(url: str, error: Exception) -> str:
    """Why a connection was not made, one of UNCONNECTED. Raises RemoteError for what trying again cannot mend."""
    if isinstance(error, InvalidStatus):
        status, body = error.response.status_code, error.response.body or b""
        reason = f"{status}: {body.decode(errors='replace').strip()}"
        if status in FINAL_STATUS:
            raise RemoteError("refused", f"{url} answers {reason}") from error
        return reason
    if isinstance(error, ssl.SSLCertVerificationError):
        raise RemoteError(
            "refused",
            f"the certificate of {url} is not trusted here ({error.verify_message}); "
            "start this program with SSL_CERT_FILE=the server's certificate",
        ) from error
    if isinstance(error, InvalidURI | ValueError):  # a port that is no number
        raise RemoteError("refused", f"'{url}' is no address; give ws://HOST:PORT") from error
    return str(error)


def _read_error(message: str) -> tuple[Any, RemoteError]:
    content = _json_object(message)
    return content.get("id"), RemoteError(
        str(content.get("error", "failed")), str(content.get("message", message[:2000]))
    )


def _json_object(message: str) -> dict[str, Any]:
    try:
        content = json.loads(message)
    except ValueError:  # openpi's own server sends a traceback as text
        return {}
    return content if isinstance(content, dict) else {}
