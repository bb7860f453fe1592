"""Who may connect, from where, how much: decided before a message is read."""

import asyncio
import base64
import contextlib
import http.client
import json
import socket
import struct
import urllib.error
import urllib.request
from pathlib import Path

import msgpack
import numpy as np
import pytest
import websockets.sync.client
from serving_fakes import FakePolicy, Running, expected, observation
from websockets.exceptions import ConnectionClosed, InvalidStatus

from innerloop.client import AsyncRemotePolicy, RemoteError, RemotePolicy
from innerloop.client.packing import pack, unpack
from innerloop.serve.access import ServeError, ServeOptions, is_loopback

TOKEN = "correct horse battery"


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.read()


def status(url, **headers):
    try:
        get(url, **headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "robot.local"])
def test_a_public_bind_needs_a_token_or_the_flag(host):
    with pytest.raises(ServeError, match="token"):
        ServeOptions(host=host).check()
    ServeOptions(host=host, token=TOKEN).check()
    ServeOptions(host=host, allow_public=True).check()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.0.0.2", True), ("10.0.0.1", False)],
)
def test_what_counts_as_loopback(host, local):
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token": "short"}, "8 characters"),
        ({"token": "gr\u00fcne Tonne"}, "a header cannot carry"),
        ({"port": 70000}, "--port 70000 is no port"),
        ({"protocol": "groot", "http_port": -1}, "--http-port -1 is no port"),
        ({"protocol": "lerobot", "port": 8000}, "--port and --http-port are both 8000"),
        ({"certificate": Path("nowhere.pem"), "private_key": Path("nowhere.key")}, "no file 'nowhere.pem'"),
        ({"certificate": Path(__file__), "private_key": Path(__file__)}, "no certificate and its private key"),
        ({"protocol": "http"}, "openpi, lerobot, groot"),
        ({"certificate": "a.pem"}, "private key"),
        ({"protocol": "groot", "certificate": "a", "private_key": "b"}, "no TLS"),
    ],
)
def test_options_that_cannot_work_are_refused(options, says):
    with pytest.raises(ServeError, match=says):
        ServeOptions(**options).check()


def test_it_listens_where_it_was_told_and_nowhere_else():
    with Running(FakePolicy(), host="127.0.0.1") as server:
        server.ready()
        bound = [each.getsockname()[0] for each in server.server._websockets.sockets]
    assert bound == ["127.0.0.1"]


def test_every_page_but_health_needs_the_token():
    with Running(FakePolicy(), token=TOKEN) as server:
        server.ready()
        assert get(f"{server.http}/healthz") == b"OK\n"
        for page in ("/", "/metadata", "/truth", "/live", "/metrics", "/frame?session=a&camera=b"):
            assert status(server.http + page) == 401
            assert status(server.http + page, Authorization="Bearer wrong token") == 401
        basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
        for header in (f"Bearer {TOKEN}", f"Api-Key {TOKEN}", f"Basic {basic}"):
            assert json.loads(get(f"{server.http}/metadata", Authorization=header))["fingerprint"] == "f00d"
        assert TOKEN.encode() not in get(f"{server.http}/truth", Authorization=f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("target", "authorization", "code"),
    [
        (b"/truth", b"Bearer \xff\xfe", b"401"),  # bytes that no token has
        (b"/truth", b"Basic \xff", b"401"),
        (b"//[x", b"Bearer " + TOKEN.encode(), b"400"),  # no address, and no error of the server's either
    ],
)
def test_heads_that_no_client_sends_are_answered(target, authorization, code):
    head = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: " + authorization + b"\r\n\r\n"
    with (
        Running(FakePolicy(), token=TOKEN) as server,
        socket.create_connection(("127.0.0.1", server.server.port), timeout=5) as raw,
    ):
        raw.sendall(head)
        assert raw.recv(65536).startswith(b"HTTP/1.1 " + code)


def test_a_wrong_token_is_told_from_none():
    with Running(FakePolicy(), token=TOKEN) as server:
        with pytest.raises(RemoteError, match="a token is needed"):
            RemotePolicy(server.url)
        with pytest.raises(RemoteError, match="not the one this server was started with"):
            RemotePolicy(server.url, token="another battery")


def test_tcp_notices_robots_that_lost_power_or_network():
    with Running(FakePolicy()) as server, RemotePolicy(server.ready() and server.url):
        (connection,) = server.server._connections
        held = connection._socket.transport.get_extra_info("socket")
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_a_websocket_without_the_token_is_turned_away_at_the_door():
    with Running(FakePolicy(), token=TOKEN) as server:
        server.ready()
        for token in (None, "wrong token"):
            with pytest.raises(RemoteError, match="401"):
                RemotePolicy(server.url, token=token)
        with RemotePolicy(server.url, token=TOKEN) as policy:
            np.testing.assert_array_equal(policy.infer(observation(1)).actions, expected(observation(1)))

        async def ask():
            async with AsyncRemotePolicy(server.url, token=TOKEN) as policy:
                return await policy.infer(observation(1))

        np.testing.assert_array_equal(asyncio.run(ask()).actions, expected(observation(1)))


def test_pages_of_other_sites_cannot_reach_a_loopback_server():
    with Running(FakePolicy()) as server:
        server.ready()
        with (
            pytest.raises(InvalidStatus, match="403"),
            websockets.sync.client.connect(server.url, origin="https://evil.example"),
        ):
            pass
        assert status(f"{server.http}/live", Host="evil.example") == 403  # a name that was made to point here
        assert status(f"{server.http}/live", Host="localhost:8000") == 200


def test_requests_beyond_the_rate_are_refused_not_queued():
    with Running(FakePolicy(), rate=5) as server:
        server.ready()
        with RemotePolicy(server.url) as policy:
            codes = []
            for number in range(12):
                try:
                    policy.infer(observation(number))
                    codes.append("ok")
                except RemoteError as error:
                    codes.append(error.code)
        assert codes[:5] == ["ok"] * 5
        assert codes.count("rate") >= 5


def test_clients_beyond_the_limit_are_told_to_come_back():
    with Running(FakePolicy(), max_clients=2) as server:
        server.ready()
        full = contextlib.ExitStack()
        with full:
            full.enter_context(RemotePolicy(server.url))
            full.enter_context(RemotePolicy(server.url))
            third = full.enter_context(websockets.sync.client.connect(server.url))
            with pytest.raises(ConnectionClosed, match="1013"):
                third.recv()


def test_tls(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))  # the client trusts it as it would an installed one
    with Running(FakePolicy(), certificate=certificate[0], private_key=certificate[1]) as server:
        server.ready()
        with RemotePolicy(f"wss://localhost:{server.server.port}") as policy:
            np.testing.assert_array_equal(policy.infer(observation(1)).actions, expected(observation(1)))
        with pytest.raises((http.client.HTTPException, OSError)):
            get(f"http://127.0.0.1:{server.server.port}/healthz")


def test_a_certificate_that_is_not_trusted_is_said_at_once(certificate, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with Running(FakePolicy(), certificate=certificate[0], private_key=certificate[1]) as server:
        url = f"wss://localhost:{server.server.port}"
        with pytest.raises(RemoteError, match=r"not trusted here .* SSL_CERT_FILE"):
            RemotePolicy(url)
        with pytest.raises(RemoteError, match=r"not trusted here .* SSL_CERT_FILE"):
            asyncio.run(AsyncRemotePolicy(url).connect())


def array(data=b"12345678", dtype="<f4", shape=(2,)):
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


def spoiled(**changes):
    return pack({**observation(1), **changes})


HOSTILE = {
    "empty": b"",
    "noise": bytes(range(256)) * 4,
    "truncated": spoiled()[:-100],
    "a list that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "nested 100,000 deep": b"\x91" * 100_000,
    "not a map": pack([1, 2, 3]),
    "a pickle": b"\x80\x04cposix\nsystem\n(S'touch /tmp/owned'\ntR.",
    "a zip archive": b"PK\x03\x04" + b"\x00" * 200,
    "an object array": msgpack.packb({"state": array(dtype="|O")}),
    "a structured array": msgpack.packb({"state": array(dtype="f4,f4")}),
    "an array of another size than it says": msgpack.packb({"state": array(shape=(2_000_000_000,))}),
    "a negative size": msgpack.packb({"state": array(shape=(-1,))}),
    "an extension": msgpack.packb(msgpack.ExtType(4, b"code")),
    "NaN in the state": spoiled(state=np.full(8, np.nan, np.float32)),
    "infinity in the noise": spoiled(noise=np.full((10, 7), np.inf, np.float32)),
    "a picture with four channels": spoiled(images={"base": np.zeros((8, 8, 4), np.uint8)}),
    "a picture of objects": spoiled(images={"base": "picture.png"}),
    "a prompt that is a number": spoiled(prompt=5),
    "a prompt of a megabyte": spoiled(prompt="x" * 1_000_000),
    "a session name of a megabyte": spoiled(session="x" * 1_000_000),
    "a negative seed": spoiled(seed=-1),
    "a deadline in the past": spoiled(deadline_ms=-5.0),
    "a huge number": spoiled(timestamp=2**64 - 1, seed=2**64 - 1),
    "a previous chunk that is text": spoiled(previous={"actions": "yes"}),
    "a previous chunk with more": spoiled(previous={"actions": np.zeros((2, 7), np.float32), "run": "rm"}),
    "a reset of nothing": pack({"reset": 5}),
    "text": "hello",
    "two cameras of one name": spoiled(
        images={"base": np.zeros((8, 8, 3), np.uint8), "observation/base": np.zeros((8, 8, 3), np.uint8)}
    ),
}


@pytest.fixture(scope="module")
def open_server():
    with Running(FakePolicy()) as server:
        yield server.ready()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_gets_an_error_and_the_connection_lives(open_server, name):
    with websockets.sync.client.connect(open_server.url, max_size=None) as connection:
        connection.recv()
        connection.send(HOSTILE[name])
        answer = json.loads(connection.recv(timeout=5))
        assert answer["error"] in ("bad_request", "observation")
        assert answer["message"]
        connection.send(pack(observation(1)))
        np.testing.assert_array_equal(unpack(connection.recv())["actions"], expected(observation(1)))


def handshake(port):
    raw = socket.create_connection(("127.0.0.1", port), timeout=5)
    raw.sendall(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    while b"\r\n\r\n" not in raw.recv(65536):
        pass
    return raw


def closed_with(raw):
    """The close code that the server sends, if it sends one before it hangs up."""
    data = b""
    while part := raw.recv(65536):
        data += part
    where = data.rfind(b"\x88")
    return struct.unpack(">H", data[where + 2 : where + 4])[0] if where >= 0 else None


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc2\x85\x00\x00\x00\x00\x78\x9c\x03\x00\x00", 1002),  # compressed, although nobody agreed to
        (b"\x82\x05hello", 1002),  # not masked
        (b"\x82\xff\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00", 1009),  # announces 64 GiB
        (b"\x8f\x80\x00\x00\x00\x00", 1002),  # an unknown opcode
    ],
)
def test_frames_that_break_the_protocol_end_the_connection(open_server, frame, code):
    with handshake(open_server.server.port) as raw:
        raw.sendall(frame)
        assert closed_with(raw) == code
    with RemotePolicy(open_server.url) as policy:
        policy.infer(observation(1))


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET " + b"x" * 100_000,
    ],
)
def test_other_speech_on_the_port_is_hung_up_on(open_server, head):
    with socket.create_connection(("127.0.0.1", open_server.server.port), timeout=5) as raw:
        raw.sendall(head + b"\r\n\r\n")
        answer = b""
        try:
            while part := raw.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert not answer.startswith(b"HTTP/1.1 200")
    assert get(f"{open_server.http}/healthz") == b"OK\n"
