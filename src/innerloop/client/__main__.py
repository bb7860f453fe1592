"""`python -m innerloop.client ws://host:8000 [--token T]`: says which step between here and an action fails."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from innerloop.client.remote import RemotePolicy
from innerloop.client.wire import RemoteError

REPEATS = 20


def check(url: str, token: str | None, patience: float, say: Callable[[str], None]) -> bool:
    """Connect, decide twice on one made-up observation and seed, time a few more; whether all of it held."""
    try:
        policy = RemotePolicy(url, token=token, patience=patience)
    except RemoteError as error:
        say(f"connect: FAILED, {error}")
        return False
    with policy:
        metadata = policy.metadata
        shown = ("policy", "fingerprint", "precision", "device", "kernels", "weights_version")
        say("connect: ok, " + json.dumps({name: metadata.get(name) for name in shown}))
        if "cameras" not in metadata or "state_dim" not in metadata:
            say("decide: FAILED, the server does not say its cameras and state width; it is no innerloop server")
            return False
        try:
            first, second = (policy.infer(_observation(metadata), seed=0) for _ in range(2))
            latency = _latency(policy, metadata)
        except RemoteError as error:
            say(f"decide: FAILED, {error}")
            return False
        say(f"decide: ok, actions {first.actions.shape}")
        finite = bool(np.isfinite(first.actions).all())
        same = first.actions.tobytes() == second.actions.tobytes()
        say(f"finite: {'ok' if finite else 'FAILED, the actions hold NaN or infinity'}")
        say(f"repeat: {'ok, same bits' if same else 'FAILED, one observation and seed gave two answers'}")
        say(latency)
    return finite and same


def _latency(policy: RemotePolicy, metadata: Mapping[str, Any]) -> str:
    observation, times, served = _observation(metadata), [], []
    for seed in range(REPEATS):
        started = time.perf_counter()
        chunk = policy.infer(observation, seed=seed)
        times.append((time.perf_counter() - started) * 1000)
        served.append(chunk.timing.get("infer_ms", 0.0))
    return f"latency: p50 {np.median(times):.2f} ms here, {np.median(served):.2f} ms of it in the policy"


def _observation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    unit = metadata.get("processing", {}).get("image", {}).get("range") == "unit"
    pictures = {str(name): random.integers(0, 256, (224, 224, 3), np.uint8) for name in metadata["cameras"]}
    return {
        "images": {name: picture / np.float32(255) if unit else picture for name, picture in pictures.items()},
        "state": np.zeros(int(metadata["state_dim"]), np.float32),
        "prompt": "self-test",
    }


def main() -> int:
    """Exit status 1 when a step failed."""
    parser = argparse.ArgumentParser(prog="python -m innerloop.client", description=__doc__)
    parser.add_argument("url", help="ws://host:port or wss://host:port")
    parser.add_argument("--token", default=None)
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to wait for the server")
    arguments = parser.parse_args()
    return 0 if check(arguments.url, arguments.token, arguments.patience, print) else 1


if __name__ == "__main__":
    sys.exit(main())
