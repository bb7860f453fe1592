"""What really runs, as plain data: the policy's own account beside the server's."""

import resource
import sys
import time
from dataclasses import asdict
from typing import Any

from innerloop.client.wire import PROTOCOL
from innerloop.serve.access import ServeOptions
from innerloop.serve.metrics import Metrics
from innerloop.serve.protocol import plain
from innerloop.serve.worker import Worker


class Truth:
    """Answers `/metadata`, `/truth` and the greeting of a connection. The token is never part of it."""

    def __init__(self, worker: Worker, metrics: Metrics, options: ServeOptions) -> None:
        self._worker = worker
        self._metrics = metrics
        self._options = options
        self._since = time.time()

    def metadata(self) -> dict[str, Any]:
        """The policy's metadata with the units, protocol and weights version that every client needs."""
        policy = self._worker.policy
        return {
            **(plain(policy.metadata) if policy is not None else {}),
            "action_units": "robot",  # `actions` is un-normalised; `actions_normalized` is not
            "protocol": PROTOCOL,
            "weights_version": self._worker.version,
            "state": str(self._worker.state),
        }

    def report(self) -> dict[str, Any]:
        """Everything: metadata, the receipt of the last answer, the options in force, memory, counts."""
        receipt = self._metrics.receipt
        return {
            "metadata": self.metadata(),
            "running": None if receipt is None else plain(asdict(receipt)),
            "options": self._resolved(),
            "memory": _memory(),
            "failure": None if self._worker.failure is None else str(self._worker.failure),
            "up_seconds": time.time() - self._since,
        }

    def live(self) -> dict[str, Any]:
        """What the page draws: latency by stage, queue, sessions and their cameras."""
        sessions = [
            {
                "name": session.name,
                "episode": session.episode,
                "decisions": session.decisions,
                "last_ms": session.last_ms,
                "idle_s": max(0.0, time.monotonic() - session.seen),
                "cameras": [name for name, picture in session.images.items() if picture is not None],
            }
            for session in self._worker.sessions()
        ]
        return {
            **self._metrics.summary(),
            "state": str(self._worker.state),
            "queue": self._worker.waiting,
            "sessions": sessions,
            "weights_version": self._worker.version,
        }

    def exposition(self) -> bytes:
        """Prometheus metrics with the gauges brought up to date."""
        self._metrics.queue.set(self._worker.waiting)
        self._metrics.sessions.set(len(self._worker.sessions()))
        return self._metrics.exposition()

    def frame(self, session: str, camera: str) -> Any:
        """The last picture of a session's camera, or None."""
        for known in self._worker.sessions():
            if known.name == session:
                return known.images.get(camera)
        return None

    def _resolved(self) -> dict[str, Any]:
        options = plain(asdict(self._options))
        options |= {"token": self._options.token is not None, "private_key": self._options.private_key is not None}
        return {**options, "port": self._options.listening_port}


def _memory() -> dict[str, int]:
    memory = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        memory |= {"device_used_bytes": total - free, "device_bytes": total}
        memory["device_allocated_bytes"] = torch.cuda.memory_allocated()
    return memory
