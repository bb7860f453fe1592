"""A small deterministic policy, and a server running beside the test."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from innerloop.contract import Chunk, NonFiniteError, ObservationError, Receipt
from innerloop.serve.access import ServeOptions
from innerloop.serve.server import Server

CAMERAS = ("base", "wrist")
STATE_DIM, ACTION_DIM, HORIZON = 8, 7, 10


def expected(
    observation: Mapping[str, Any], seed: int | None = None, noise: np.ndarray | None = None, bias: float = 0.0
):
    """What FakePolicy answers: a function of every byte of the inputs and of nothing else."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(observation["images"]):
        digest.update(name.encode() + np.ascontiguousarray(observation["images"][name]).tobytes())
    digest.update(np.asarray(observation["state"], np.float32).tobytes() + observation["prompt"].encode())
    digest.update(str(seed).encode() + (b"" if noise is None else np.asarray(noise, np.float32).tobytes()))
    random = np.random.default_rng(int.from_bytes(digest.digest()))
    return random.standard_normal((HORIZON, ACTION_DIM), dtype=np.float32) + np.float32(bias)


class FakePolicy:
    """`expected` as a policy; `delay` seconds a decision, the thread of each call kept."""

    def __init__(self, delay: float = 0.0, bias: float = 0.0, check: bool = True, **metadata: Any) -> None:
        self.delay = delay
        self.bias = bias
        self.threads: set[int] = set()
        self.resets: list[str] = []
        self.open: set[str] = set()
        self.calls = 0
        self.metadata: dict[str, Any] = {"policy": "fake", "fingerprint": "f00d", "precision": "fp32", **metadata}
        if check:
            self.metadata |= {"cameras": CAMERAS, "state_dim": STATE_DIM, "action_dim": ACTION_DIM, "horizon": HORIZON}

    def infer(self, observation, *, noise=None, seed=None, session="default"):
        self.threads.add(threading.get_ident())
        self.calls += 1
        self.open.add(session)
        if observation["prompt"] == "crash":
            raise ZeroDivisionError("a bug in the model")
        if observation["prompt"] == "refuse":
            raise ObservationError("camera 'left' is missing; the checkpoint expects base, wrist")
        if observation["prompt"] == "explode":
            raise NonFiniteError("the actions are not finite")
        time.sleep(self.delay)
        actions = expected(observation, seed, noise, self.bias)
        if observation["prompt"] == "nan":
            actions[3, 2] = np.nan
        receipt = Receipt("f00d", "fake", "fp32", "cpu", "reference", ("vision", "action"), 64, 5, seed)
        return Chunk(actions, actions / 2, {"vision": 0.5, "action": 1.5}, receipt)

    def reset(self, session="default"):
        self.resets.append(session)
        self.open.discard(session)


class BatchingPolicy(FakePolicy):
    """FakePolicy that decides for up to `max_batch` robots in the time of one."""

    def __init__(self, delay: float = 0.0, max_batch: int = 8) -> None:
        super().__init__(delay, max_batch=max_batch)
        self.sizes: list[int] = []

    def infer_batch(self, observations, *, noises, seeds, sessions, previous):
        self.sizes.append(len(observations))
        delay, self.delay = self.delay, 0.0
        time.sleep(delay)
        try:
            return [
                self.infer(o, noise=n, seed=s, session=k, **({} if p is None else {"previous": p}))
                for o, n, s, k, p in zip(observations, noises, seeds, sessions, previous, strict=True)
            ]
        finally:
            self.delay = delay


def observation(number: int = 0, size: int = 32, prompt: str = "pick up the red block") -> dict[str, Any]:
    """Observation `number`: other numbers give other pixels and states."""
    random = np.random.default_rng(number)
    return {
        "images": {name: random.integers(0, 256, (size, size, 3), np.uint8) for name in CAMERAS},
        "state": random.standard_normal(STATE_DIM).astype(np.float32),
        "prompt": prompt,
    }


class Running:
    """A server in a thread with its own event loop; stopped at the end of the `with`."""

    def __init__(self, load, **options: Any) -> None:
        self._load = load if callable(load) else lambda: load
        self._options = ServeOptions(**{"port": 0, "http_port": 0, **options})
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(self._load, self._options)
        await self.server.start()
        self._started.set()
        await self._stop.wait()
        await self.server.stop()

    def __enter__(self) -> "Running":
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and end."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)
            assert not self._thread.is_alive()

    def ready(self) -> "Running":
        """Wait until the policy is warm."""
        self.do(self.server.ready())
        return self

    def do(self, work, seconds: float = 20):
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.http_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"


def wait_until(condition, seconds: float = 5.0) -> None:
    """Wait for something that another thread makes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.01)
