"""Kernels joined to the graph launches that caused them."""

from typing import Any

import pytest

from innerloop.contract import InnerloopError
from innerloop.measure.trace import kernels, launches_by_graph


def trace_of(decisions: int, counts: dict[str, int]) -> list[dict[str, Any]]:
    """A trace in which every decision replays the graphs in order; kernels come in any order, copies among them."""
    launches, work = [], []
    for decision in range(decisions):
        for place, count in enumerate(counts.values()):
            number = 100 * decision + place
            args = {"correlation": number}
            launches.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": number, "args": args})
            work += [{"cat": "kernel", "name": "k", "ts": 1e6 + number, "args": args}] * count
            work.append({"cat": "gpu_memcpy", "name": "Memcpy", "ts": 1e6, "args": args})
    return [*reversed(work), *reversed(launches), {"cat": "cpu_op", "name": "aten::mm", "ts": 0}]


def test_kernels_by_graph() -> None:
    counts = {"prompt": 1, "vision": 190, "context": 140, "action": 570}
    events = trace_of(3, counts)
    assert launches_by_graph(events, list(counts)) == counts
    assert len(kernels(events)) == 3 * sum(counts.values())


def test_other_launches_in_the_process_are_an_error() -> None:
    events = trace_of(2, {"vision": 1, "action": 2})
    extra = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 5e5, "args": {"correlation": 9999}}
    with pytest.raises(InnerloopError, match="5 graph launches"):
        launches_by_graph([*events, extra], ["vision", "action"])
    blind = [event for event in events if event["cat"] != "kernel"]
    with pytest.raises(InnerloopError, match="none of the 0 kernels"):
        launches_by_graph(blind, ["vision", "action"])
    with pytest.raises(InnerloopError, match="0 graph launches"):
        launches_by_graph([], ["vision"])
