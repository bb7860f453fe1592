"""Who may connect, from where, how much and how fast; all decided before a message is read."""

import base64
import hmac
import ipaddress
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from innerloop.contract.errors import InnerloopError
from innerloop.process.action import ActionLimits
from innerloop.serve.protocol import RequestError


class ServeError(InnerloopError):
    """The server is not started as asked; the text says why and what to do."""


PORTS = {"openpi": 8000, "lerobot": 8080, "groot": 5555}  # where each kind of client looks by default


@dataclass(frozen=True)
class ServeOptions:
    """How a policy is served. Sizes in bytes, times in seconds, rates in messages per second and client.

    `http_port` carries the page, the truth endpoint, the metrics and openpi's protocol; with the protocol
    "openpi" it is `port` itself. Port 0 takes a free one.
    """

    protocol: str = "openpi"
    host: str = "127.0.0.1"
    port: int | None = None
    http_port: int = 8000
    token: str | None = None
    allow_public: bool = False
    certificate: Path | None = None
    private_key: Path | None = None
    max_message: int = 32 << 20
    rate: float = 2000.0
    max_clients: int = 64
    session_timeout: float = 600.0
    limits: ActionLimits | None = None

    def check(self) -> None:
        """Raises ServeError for a combination that is unsafe or cannot work."""
        if self.protocol not in PORTS:
            raise ServeError(f"protocol '{self.protocol}' is none of {', '.join(PORTS)}")
        if not is_loopback(self.host) and self.token is None and not self.allow_public:
            raise ServeError(
                f"'{self.host}' can be reached from other machines and there is no token: give one (--token), bind to "
                "127.0.0.1, or say allow_public (--allow-public) if everyone on this network is trusted"
            )
        if self.token is not None and len(self.token) < 8:
            raise ServeError("the token is shorter than 8 characters; make one with `openssl rand -hex 16`")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ServeError("the token holds what a header cannot carry; make one with `openssl rand -hex 16`")
        self._check_ports()
        if (self.certificate is None) != (self.private_key is None):
            raise ServeError("TLS needs both a certificate and its private key: give --certificate and --private-key")
        if self.certificate is not None and self.protocol == "groot":
            raise ServeError("GR00T's client speaks plain ZeroMQ: no TLS; bind to loopback behind an encrypted tunnel")
        self.tls()

    def tls(self) -> ssl.SSLContext | None:
        """The server's side of TLS, None without a certificate. Raises ServeError for files that are no pair."""
        if self.certificate is None or self.private_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for file in (self.certificate, self.private_key):
            if not file.is_file():
                raise ServeError(f"there is no file '{file}'; --certificate and --private-key are PEM files")
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except OSError as error:
            raise ServeError(
                f"'{self.certificate}' and '{self.private_key}' are no certificate and its private key ({error}); "
                "give two PEM files that belong together, the key without a pass phrase"
            ) from error
        return context

    def _check_ports(self) -> None:
        for option, port in (("--port", self.listening_port), ("--http-port", self.http_port)):
            if not 0 <= port <= 65535:
                raise ServeError(f"{option} {port} is no port; choose one from 1 to 65535, or 0 for a free one")
        if self.protocol != "openpi" and self.listening_port == self.http_port != 0:
            raise ServeError(
                f"--port and --http-port are both {self.http_port}; the page needs a port beside {self.protocol}'s"
            )

    @property
    def listening_port(self) -> int:
        """The port of the protocol asked for."""
        return PORTS[self.protocol] if self.port is None else self.port


def bracketed(host: str) -> str:
    """The host as it stands before a port in an address."""
    return f"[{host}]" if ":" in host else host


def port_in_use(host: str, port: int, error: Exception) -> ServeError:
    """The error of an address that cannot be bound."""
    return ServeError(
        f"{bracketed(host)}:{port} cannot be bound ({error}); choose another --host, --port or --http-port"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def same_token(expected: str | None, given: str | None) -> bool:
    """Compare in constant time; everything passes when no token is expected."""
    return expected is None or (given is not None and hmac.compare_digest(expected.encode(), given.encode()))


def token_in(authorization: str | None) -> str | None:
    """The token in an Authorization value: openpi's `Api-Key T`, `Bearer T`, or the password of `Basic`."""
    kind, _, value = (authorization or "").partition(" ")
    if kind.lower() in ("api-key", "bearer"):
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return None
    return None


def from_a_foreign_page(headers: Mapping[str, str], host: str) -> bool:
    """Whether a browser sends this for a page of another site, or under a name that only pretends to be loopback."""
    target = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != target:
        return True
    name = target.rpartition(":")[0] if target.rpartition(":")[2].isdigit() else target
    return is_loopback(host) and not is_loopback(name or "localhost")


class Rate:
    """A token bucket: `rate` a second on average, one second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate
        self._last = time.monotonic()

    def spend(self) -> None:
        """Count one message. Raises RequestError when there were too many."""
        now = time.monotonic()
        self._level = min(self._rate, self._level + (now - self._last) * self._rate)
        self._last = now
        if self._level < 1:
            raise RequestError("rate", f"more than {self._rate:g} messages a second; send only the newest observation")
        self._level -= 1
