"""What a host in another language needs: addresses, windows, graphs in order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from innerloop.contract.plan import Plan
from innerloop.runtime.arena import Arena
from innerloop.runtime.capture import Programs
from innerloop.runtime.refresh import Refresh


@dataclass(frozen=True)
class Export:
    """A policy lent to a host: until it closes, the arena belongs to the host and decisions are refused.

    `manifest` is JSON-able; `windows` are tensors with `__dlpack__` at the manifest's addresses; `graphs` run by name
    (on CUDA a replay on the calling thread's current stream).
    """

    manifest: Mapping[str, Any]
    windows: Mapping[str, torch.Tensor]
    graphs: Mapping[str, Callable[[], None]]
    _give_back: Callable[[], None] = field(repr=False)

    def close(self) -> None:
        """The runtime takes the arena back; what the host left there counts for no session."""
        self._give_back()

    def __enter__(self) -> "Export":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def manifest(
    plans: Mapping[int, Plan], arena: Arena, refresh: Refresh, programs: Programs, fingerprint: str
) -> dict[str, Any]:
    """Plans with addresses, graphs with their order for each capacity, and the region that a capsule copies."""
    return {
        "schema": 1,
        "fingerprint": fingerprint,
        "device": str(arena.device),
        "plans": {str(capacity): plan.manifest(arena.addresses) for capacity, plan in plans.items()},
        "order": {
            str(capacity): [programs.names[step.key] for step in steps]
            for capacity, steps in zip(plans, refresh.steps, strict=True)
        },
        "graphs": {
            programs.names[step.key]: {
                "stages": list(step.names),
                "reads": [refresh.names[i] for i in step.reads],
                "writes": [refresh.names[i] for i in step.writes],
                "handle": _handle(programs, programs.names[step.key]),
            }
            for step in refresh.programs
        },
        "state": {"address": arena.state.data_ptr(), "bytes": arena.state.numel()},
        "bytes": arena.account(),
    }


def _handle(programs: Programs, name: str) -> int | None:
    """The cudaGraphExec_t as an integer, for cudaGraphLaunch."""
    graph = programs.graphs.get(name)
    return None if graph is None else int(graph.raw_cuda_graph_exec())
