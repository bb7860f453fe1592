"""Plain HTTP on the websocket's port: health, truth, metrics, and the live page without outside resources."""

import asyncio
import json
import struct
import zlib
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from innerloop.serve.access import from_a_foreign_page, same_token, token_in
from innerloop.serve.truth import Truth
from innerloop.serve.worker import State, Worker

THUMBNAIL = 320  # pixels of a picture's longer side on the page, at most
PAGE = (files("innerloop.serve") / "live.html").read_bytes()
HEALTH = {State.READY: HTTPStatus.OK, State.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR}


class Pages:
    """Answers a request that is no websocket handshake; lets an allowed handshake pass by returning None."""

    def __init__(self, worker: Worker, truth: Truth, host: str, token: str | None) -> None:
        self._worker = worker
        self._truth = truth
        self._host = host
        self._token = token

    async def answer(self, request: Request) -> Response | None:
        """The response to a request's head, before any body or frame is read."""
        if from_a_foreign_page(request.headers, self._host):
            return _text(HTTPStatus.FORBIDDEN, "requests of other sites' pages are refused\n")
        try:
            address = urlsplit(request.path)
        except ValueError:
            return _text(HTTPStatus.BAD_REQUEST, "the request's target is not a path\n")
        if address.path == "/healthz":
            state = self._worker.state
            text = "OK\n" if state is State.READY else f"{state}\n"
            return _text(HEALTH.get(state, HTTPStatus.SERVICE_UNAVAILABLE), text)
        given = token_in(request.headers.get("Authorization"))
        if not same_token(self._token, given):
            wrong = "a token is needed" if given is None else "the token is not the one this server was started with"
            return _text(
                HTTPStatus.UNAUTHORIZED,
                f"{wrong}: send it as 'Authorization: Bearer <token>' or 'Api-Key <token>'\n",
                [("WWW-Authenticate", 'Basic realm="innerloop", charset="UTF-8"')],
            )
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return None
        return await self._page(address.path, parse_qs(address.query))

    async def _page(self, path: str, query: dict[str, list[str]]) -> Response:
        if path == "/":
            return _respond(HTTPStatus.OK, "text/html; charset=utf-8", PAGE)
        if path == "/metadata":
            return _json(self._truth.metadata())
        if path == "/truth":
            return _json(self._truth.report())
        if path == "/live":
            return _json(self._truth.live())
        if path == "/metrics":
            return _respond(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self._truth.exposition())
        if path == "/frame":
            return await self._frame(query)
        return _text(HTTPStatus.NOT_FOUND, "pages: / /healthz /metadata /truth /metrics\n")

    async def _frame(self, query: dict[str, list[str]]) -> Response:
        picture = self._truth.frame(query.get("session", [""])[0], query.get("camera", [""])[0])
        if picture is None:
            return _text(HTTPStatus.NOT_FOUND, "no such session or camera\n")
        body = await asyncio.to_thread(png, picture)
        return _respond(HTTPStatus.OK, "image/png", body)


def png(picture: np.ndarray) -> bytes:
    """An RGB picture [H, W, 3], uint8 or float 0..1, as a PNG of at most THUMBNAIL pixels a side."""
    stride = -(-max(picture.shape[:2]) // THUMBNAIL)
    small = picture[::stride, ::stride]
    if small.dtype != np.uint8:
        small = (np.clip(small, 0, 1) * 255).astype(np.uint8)
    height, width = small.shape[:2]
    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each row begins with its filter type, 0
    rows[:, 1:] = small.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def _json(value: Any) -> Response:
    return _respond(HTTPStatus.OK, "application/json", json.dumps(value).encode())


def _text(status: HTTPStatus, text: str, extra: list[tuple[str, str]] | None = None) -> Response:
    return _respond(status, "text/plain; charset=utf-8", text.encode(), extra)


def _respond(status: HTTPStatus, kind: str, body: bytes, extra: list[tuple[str, str]] | None = None) -> Response:
    headers = Headers(
        [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            (
                "Content-Security-Policy",
                "default-src 'self'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
            ),
            *(extra or []),
        ]
    )
    return Response(int(status), status.phrase, headers, body)
