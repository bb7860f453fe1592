"""What the server counts: Prometheus metrics, and the last few hundred answers for the page."""

import threading
from collections import deque
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from innerloop.serve.pending import Entry
from innerloop.serve.protocol import Reply

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)  # seconds
WINDOW = 512  # answers that the page's percentiles are taken over


class Metrics:
    """One registry a server, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "innerloop_requests", "Requests answered, by outcome", ["outcome"], registry=self.registry
        )
        self._drops = Counter("innerloop_drops", "Work nobody waits for, by reason", ["reason"], registry=self.registry)
        self._late = Counter("innerloop_deadline_misses", "Answers dropped for being late", registry=self.registry)
        self._latency = Histogram(
            "innerloop_stage_seconds", "Time spent by stage", ["stage"], buckets=BUCKETS, registry=self.registry
        )
        self.queue = Gauge("innerloop_queue", "Requests waiting", registry=self.registry)
        self.sessions = Gauge("innerloop_sessions", "Open sessions", registry=self.registry)
        self.clients = Gauge("innerloop_clients", "Connected clients", registry=self.registry)
        self._version = Gauge("innerloop_weights_version", "Weights version in use", registry=self.registry)
        self._lock = threading.Lock()
        self._recent: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._counts: dict[str, int] = {}
        self.receipt: Any = None  # of the last answer

    def record(self, entry: Entry, reply: Reply) -> None:
        """Count one answer and its stages (ms)."""
        self._answers.labels(reply.code).inc()
        if reply.code == "late":
            self._late.inc()
        stages = dict(reply.server_timing)
        if reply.chunk is not None:
            stages |= {f"policy.{name}": float(value) for name, value in reply.chunk.timing.items()}
            self.receipt = reply.chunk.receipt or self.receipt
        for stage, milliseconds in stages.items():
            self._latency.labels(stage.removesuffix("_ms")).observe(milliseconds / 1000)
        with self._lock:
            self._counts[reply.code] = self._counts.get(reply.code, 0) + 1
            if reply.chunk is not None:
                self._recent.append(stages)

    def drop(self, reason: str, count: int) -> None:
        """Count work that nobody waits for any more."""
        if count:
            self._drops.labels(reason).inc(count)

    def version(self, version: int) -> None:
        """The weights version in use."""
        self._version.set(version)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return bytes(generate_latest(self.registry))

    def summary(self) -> dict[str, Any]:
        """p50, p99 and max by stage over the last answers (ms), the last 120 totals, and the counts by outcome."""
        with self._lock:
            recent, counts = list(self._recent), dict(self._counts)
        stages: dict[str, Any] = {}
        for name in dict.fromkeys(key for answer in recent for key in answer):
            values = np.array([answer[name] for answer in recent if name in answer])
            p50, p99 = np.percentile(values, [50, 99])
            stages[name.removesuffix("_ms")] = {"p50": float(p50), "p99": float(p99), "max": float(values.max())}
        return {"stages": stages, "totals": [answer["total_ms"] for answer in recent[-120:]], "outcomes": counts}
