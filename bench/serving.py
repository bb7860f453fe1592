"""What serving adds to a decision: round trips on loopback to a policy that answers at once, in another process.

`python bench/serving.py` prints one JSON object: milliseconds of the round trip less the time in the policy.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import urlopen

import numpy as np

from innerloop.client import RemotePolicy

WARM, CALLS = 100, 1000
SIZES = {"two 224 x 224 frames": 224, "1.3 MB": 470}


class Instant:
    """Answers every observation with the same chunk."""

    def __init__(self) -> None:
        from innerloop.contract import Chunk

        actions = np.zeros((50, 7), np.float32)
        self._chunk = Chunk(actions, actions)

    @property
    def metadata(self) -> dict[str, Any]:
        """Just a name."""
        return {"policy": "instant"}

    def infer(self, observation: Mapping[str, Any], **_: Any) -> Any:
        """One decision."""
        return self._chunk

    def reset(self, session: str = "default") -> None:
        """There is nothing to forget."""


def overhead(ask: Callable[[dict[str, Any]], float], size: int) -> dict[str, float]:
    """Percentiles over CALLS; `ask` returns the milliseconds that the policy took."""
    random = np.random.default_rng(0)
    images = {name: random.integers(0, 256, (size, size, 3), np.uint8) for name in ("base", "wrist")}
    message = {"images": images, "state": np.zeros(8, np.float32), "prompt": "pick up the red block"}
    times = []
    for _ in range(WARM + CALLS):
        started = time.perf_counter()
        inside = ask(message)
        times.append((time.perf_counter() - started) * 1000 - inside)
    return {f"p{p}": round(float(np.percentile(times[WARM:], p)), 3) for p in (50, 95, 99)}


def clients(port: int) -> dict[str, Callable[[dict[str, Any]], float]]:
    """Ours, and openpi's where it is installed."""
    ours = RemotePolicy(f"ws://127.0.0.1:{port}")
    found: dict[str, Callable[[dict[str, Any]], float]] = {
        "innerloop.client": lambda message: ours.infer(message).timing["infer_ms"]
    }
    try:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy  # type: ignore[import-untyped]
    except ImportError:
        return found
    theirs = WebsocketClientPolicy("127.0.0.1", port)
    found["openpi-client"] = lambda message: float(theirs.infer(message)["server_timing"]["infer_ms"])
    return found


def main() -> None:
    """Measure and print."""
    if len(sys.argv) > 1:
        from innerloop.serve.access import ServeOptions
        from innerloop.serve.server import run_server

        run_server(Instant, ServeOptions(port=int(sys.argv[1]), rate=1e6))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen([sys.executable, __file__, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urlopen(f"http://127.0.0.1:{port}/healthz").close()
                break
            except OSError:
                time.sleep(0.1)
        asking = clients(port)
        figures = {name: {kind: overhead(ask, size) for kind, ask in asking.items()} for name, size in SIZES.items()}
    finally:
        server.kill()
        server.wait()
    print(json.dumps({"kind": "serving", "unit": "ms", "calls": CALLS, "overhead": figures}, indent=2))


if __name__ == "__main__":
    main()
