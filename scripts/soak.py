"""Mixed load on a served policy: robots in a closed loop, sessions cut off, and messages meant to harm.

`python scripts/soak.py --minutes 10` prints one JSON object and exits with 1 unless every good answer was right,
every bad message was refused, and sessions and memory are back where they were. `--warm-up 60` begins with a policy
that takes so many seconds to load, and robots that connect at once and must all stay and be answered.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from innerloop.client import AsyncRemotePolicy, RemoteError
from innerloop.client.packing import pack, unpack

ROBOTS = 8
DEADLINE_MS = 250.0
WAITING = 16  # robots that wait for the warm-up
LONGEST_PING = 0.1  # seconds
TOKEN = "soak-token-0123456789"
MAX_MESSAGE = 4 << 20
ALLOWED_GROWTH = 16 << 20  # bytes of resident memory between a tenth of the time and the end


class Echo:
    """Answers with its inputs: actions[i] = state * (i + 1) + seed + the mean of the pictures; 4 ms a decision."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Enough for the server's self-check."""
        return {"policy": "echo", "cameras": ["base", "wrist"], "state_dim": 7}

    def infer(self, observation: Mapping[str, Any], *, seed: int | None = None, **_: Any) -> Any:
        """One decision."""
        from innerloop.contract import Chunk

        time.sleep(0.004)
        actions = answer(observation, seed or 0)
        return Chunk(actions, actions)

    def reset(self, session: str = "default") -> None:
        """There is nothing to forget."""


def answer(observation: Mapping[str, Any], seed: int) -> np.ndarray:
    """What Echo answers, float32 [10, 7]."""
    mean = np.float32(np.mean([picture.mean() for picture in observation["images"].values()]))
    steps = np.arange(1, 11, dtype=np.float32)[:, None]
    actions: np.ndarray = steps * np.asarray(observation["state"], np.float32) + np.float32(seed) + mean
    return actions.astype(np.float32)


def serve(port: int, warm_up: float) -> None:
    """The server's process; its policy takes `warm_up` seconds to load."""
    from innerloop.serve.access import ServeOptions
    from innerloop.serve.server import run_server

    def load() -> Echo:
        time.sleep(warm_up)
        return Echo()

    run_server(load, ServeOptions(port=port, token=TOKEN, max_message=MAX_MESSAGE, rate=2000))


class Soak:
    """The clients' side: what was sent, what came back."""

    def __init__(self, port: int, pid: int, seconds: float) -> None:
        self.port = port
        self.pid = pid
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.latency_ms: list[float] = []
        self.faults: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Everything at once until the time is over; then the account."""
        before = self.live()["sessions"]
        async with asyncio.TaskGroup() as group:
            for number in range(ROBOTS):
                group.create_task(self.robot(number))
            group.create_task(self.enemy())
            group.create_task(self.cutter())
            sampling = group.create_task(self.memory())
        await asyncio.sleep(0.5)
        after = self.live()
        if len(after["sessions"]) != len(before):
            self.faults.append(f"{len(after['sessions'])} sessions stayed open")
        start, end = sampling.result()
        if end - start > ALLOWED_GROWTH:
            self.faults.append(f"resident memory grew by {(end - start) >> 20} MiB")
        p50, p99 = np.percentile(self.latency_ms, [50, 99])
        return {
            "seconds": self.seconds,
            **dict(sorted(self.counts.items())),
            "latency_ms": {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(max(self.latency_ms), 2)},
            "resident_mib": {"early": start >> 20, "end": end >> 20},
            "outcomes": after["outcomes"],
            "faults": self.faults,
        }

    async def robot(self, number: int) -> None:
        """A closed loop at 25 Hz whose every answer is checked, in order, deadlines met or reported."""
        random = np.random.default_rng(number)
        async with AsyncRemotePolicy(self.url, token=TOKEN, session=f"robot-{number}") as policy:
            step = 0
            while time.monotonic() < self.end:
                step += 1
                seen = observation(random)
                started = time.monotonic()
                try:
                    chunk = await policy.infer(seen, seed=step, deadline_ms=DEADLINE_MS, episode=step // 100)
                except RemoteError as error:
                    self.counts[f"robots_{error.code}"] += 1
                    if error.code != "late":
                        self.faults.append(f"robot {number}: {error}")
                    continue
                elapsed = (time.monotonic() - started) * 1000
                self.latency_ms.append(elapsed)
                self.counts["robots_ok"] += 1
                if not np.array_equal(chunk.actions, answer(seen, step)):
                    self.faults.append(f"robot {number} got a wrong answer at step {step}")
                await asyncio.sleep(max(0.0, 0.04 - elapsed / 1000))

    async def enemy(self) -> None:
        """Hostile messages one after the other; each must get an error or end its connection."""
        random = np.random.default_rng(99)
        messages = hostile(random)
        while time.monotonic() < self.end:
            for name, message in messages.items():
                self.counts["hostile"] += 1
                try:
                    await self.attack(name, message)
                except (OSError, TimeoutError) as error:
                    self.faults.append(f"hostile '{name}': {type(error).__name__} {error}")
            await self.wrong_token()
            await asyncio.sleep(0.02)

    async def attack(self, name: str, message: bytes) -> None:
        """One message on a connection of its own."""
        async with asyncio.timeout(10), self.opened() as connection:
            unpack(await connection.recv())  # type: ignore[arg-type]
            try:
                if name.startswith("raw"):
                    connection.transport.write(message)
                else:
                    await connection.send(message)
                reply = await connection.recv()
            except ConnectionClosed:
                self.counts["hostile_closed"] += 1
                return
            if isinstance(reply, str) and "error" in json.loads(reply):
                self.counts["hostile_refused"] += 1
            else:
                self.faults.append(f"hostile '{name}' was answered with actions")

    async def wrong_token(self) -> None:
        """A handshake with a token that is not the server's."""
        self.counts["hostile"] += 1
        try:
            async with connect(self.url, additional_headers={"Authorization": "Bearer guessed"}):
                self.faults.append("a wrong token was accepted")
        except InvalidStatus:
            self.counts["hostile_refused"] += 1

    async def cutter(self) -> None:
        """Sessions that ask and vanish without a close."""
        random = np.random.default_rng(7)
        while time.monotonic() < self.end:
            async with self.opened() as connection:
                await connection.recv()
                await connection.send(pack({**observation(random), "session": f"cut-{random.integers(1 << 60)}"}))
                self.counts["cut_off"] += 1
            await asyncio.sleep(0.05)

    async def memory(self) -> tuple[int, int]:
        """Resident bytes of the server after a tenth of the time, and at the end."""
        await asyncio.sleep(self.seconds / 10)
        early = self.resident()
        await asyncio.sleep(max(0.0, self.end - time.monotonic()))
        return early, self.resident()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ClientConnection]:
        """A connection as openpi's client makes it, cut off at the end without a goodbye."""
        headers = {"Authorization": f"Api-Key {TOKEN}"}
        connection = await connect(
            self.url, compression=None, max_size=None, ping_interval=None, additional_headers=headers
        )
        try:
            yield connection
        finally:
            if not connection.transport.is_closing():
                connection.transport.abort()

    def resident(self) -> int:
        """Resident bytes of the server's process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def live(self) -> dict[str, Any]:
        """The server's own account."""
        request = Request(f"http://127.0.0.1:{self.port}/live", headers={"Authorization": f"Bearer {TOKEN}"})
        with urlopen(request) as page:
            return dict(json.load(page))

    @property
    def url(self) -> str:
        """The server's address."""
        return f"ws://127.0.0.1:{self.port}"


def observation(random: np.random.Generator) -> dict[str, Any]:
    """Two pictures of 96 x 96 and a state."""
    return {
        "images": {name: random.integers(0, 256, (96, 96, 3), np.uint8) for name in ("base", "wrist")},
        "state": random.standard_normal(7).astype(np.float32),
        "prompt": "go",
    }


def hostile(random: np.random.Generator) -> dict[str, bytes]:
    """Malformed, oversized, truncated, NaN and hostile messages."""
    good = observation(random)
    broken = {**good, "state": np.full(7, np.nan, np.float32)}
    return {
        "noise": random.bytes(4096),
        "empty": b"",
        "truncated": pack(good)[:-1000],
        "oversized": b"\x00" * (MAX_MESSAGE + 1),
        "NaN": pack(broken),
        "infinity": pack({**good, "noise": np.full((10, 7), np.inf, np.float32)}),
        "pickle": b"\x80\x04cposix\nsystem\n(\x8c\x0etouch /tmp/evilt\x85R.",
        "list bomb": b"\xdd\xff\xff\xff\xff",
        "nesting bomb": b"\x91" * 50_000,
        "array bomb": pack({"state": {b"__ndarray__": True, b"data": b"", b"dtype": "<f8", b"shape": [1 << 40]}}),
        "object array": pack({"state": {b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]}}),
        "zip archive": b"PK\x03\x04" + bytes(1000),
        "wrong types": pack({"images": 5, "state": "x", "prompt": 7}),
        "raw deflate frame": b"\xc2\x85\x00\x00\x00\x00\x78\x9c\x03\x00\x00",
        "raw unmasked frame": b"\x82\x05hello",
        "raw enormous frame": b"\x82\xff\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00",
    }


async def wait_warm(port: int, seconds: float) -> dict[str, Any]:
    """WAITING robots on a server that warms for so long: all stay, pings are answered, and so is each robot."""
    faults: list[str] = []
    begun = time.monotonic()
    robots = [asyncio.create_task(wait_as_robot(port, number)) for number in range(WAITING)]
    longest = 0.0
    headers = {"Authorization": f"Api-Key {TOKEN}"}
    async with connect(f"ws://127.0.0.1:{port}", ping_interval=None, additional_headers=headers) as other:
        while time.monotonic() < begun + 0.8 * seconds:
            started = time.monotonic()
            await (await other.ping())
            longest = max(longest, time.monotonic() - started)
            early = [robot for robot in robots if robot.done()]
            if early:
                faults.append(f"{len(early)} robots were answered or cut off during the warm-up")
                break
            await asyncio.sleep(min(1.0, seconds / 20))
    if longest > LONGEST_PING:
        faults.append(f"a ping took {longest * 1000:.0f} ms during the warm-up")
    answered = await asyncio.gather(*robots, return_exceptions=True)
    faults += [f"robot {number}: {result}" for number, result in enumerate(answered) if result is not True]
    return {"warm_up_s": time.monotonic() - begun, "robots": answered.count(True), "ping_ms": longest * 1000,
            "faults": faults}  # fmt: skip


async def wait_as_robot(port: int, number: int) -> bool:
    """Connect as openpi's client does, with its pings, wait for the greeting, ask once; whether it was right."""
    headers = {"Authorization": f"Api-Key {TOKEN}"}
    seen = observation(np.random.default_rng(number))
    async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, additional_headers=headers) as robot:
        await robot.recv()
        await robot.send(pack({**seen, "seed": number}))
        content = unpack(await robot.recv())  # type: ignore[arg-type]
    return bool(np.array_equal(content["actions"], answer(seen, number)))


def soak(seconds: float, warm_up: float = 0.0) -> dict[str, Any]:
    """Start a server, let robots wait for its warm-up, load it for so long, stop it; returns the account."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port), "--warm-up", str(warm_up)])
    try:
        wait_for(port, "warming" if warm_up else "OK")
        warmed = asyncio.run(wait_warm(port, warm_up)) if warm_up else None
        account = asyncio.run(Soak(port, server.pid, seconds).run())
        if warmed is not None:
            account["faults"] += warmed.pop("faults")
            account["warm_up"] = warmed
        server.terminate()
        account["exit"] = server.wait(30)
        if account["exit"] != 0:
            account["faults"].append(f"the server ended with {account['exit']}")
    finally:
        server.kill()
        server.wait()
    return account


def wait_for(port: int, state: str) -> None:
    """Until the server's health is `state`. Raises TimeoutError after 60 s."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{port}/healthz") as page:
                text = page.read().decode()
        except HTTPError as error:
            with error:
                text = error.read().decode()
        except OSError:
            text = ""
        if text.strip() == state:
            return
        time.sleep(0.1)
    raise TimeoutError(f"the server did not become {state} within 60 s")


def main() -> int:
    """Exit status 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="SECONDS", help="how long the policy loads")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.warm_up)
        return 0
    account = soak(arguments.minutes * 60, arguments.warm_up)
    print(json.dumps(account, indent=2))
    return 1 if account["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
