"""Kernels joined to the graph launches that caused them."""

from typing import Any

import pytest

from innerloop.contract import InnerloopError
from innerloop.measure.profile import kernels_record, short
from innerloop.measure.record import KernelRow
from innerloop.measure.trace import events_by_graph, kernels

ORIGIN: dict[str, Any] = {
    **dict.fromkeys(("device", "command", "commit", "time", "policy", "weights", "dtype", "precision"), "x"),
    **dict.fromkeys(("fingerprint", "inputs"), "x"),
    "versions": {},
    "clocks": {},
}


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
    found = events_by_graph(events, list(counts))
    assert {graph: [len(one) for one in lists] for graph, lists in found.items()} == {
        graph: [count] * 3 for graph, count in counts.items()
    }
    assert len(kernels(events)) == 3 * sum(counts.values())


def test_other_launches_in_the_process_are_an_error() -> None:
    events = trace_of(2, {"vision": 1, "action": 2})
    extra = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 5e5, "args": {"correlation": 9999}}
    with pytest.raises(InnerloopError, match="5 graph launches"):
        events_by_graph([*events, extra], ["vision", "action"])
    blind = [event for event in events if event["cat"] != "kernel"]
    with pytest.raises(InnerloopError, match="none of the 0 kernels"):
        events_by_graph(blind, ["vision", "action"])
    with pytest.raises(InnerloopError, match="0 graph launches"):
        events_by_graph([], ["vision"])


def test_kernels_of_a_stage_add_up_and_the_largest_comes_first() -> None:
    def event(name: str, start: float, us: float, grid: list[int]) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": us, "args": {"grid": grid}}

    decision = [event("void at::f<int>(int)", 0, 2, [8, 1, 1]), event("_attend", 5, 10, [4, 16, 1])]
    again = [event("void at::f<int>(int)", 100, 4, [8, 1, 1]), event("_attend", 110, 10, [4, 16, 1])]
    fields = {"views": 2, "prompt_tokens": 48, "chunk": 10, "steps": 10, **ORIGIN}
    made = kernels_record({"vision": [decision, again], "prompt": [[], []]}, fields)
    assert made.rows == [
        KernelRow(stage="vision", kernel="_attend 4x16", launches=1, us=10.0),
        KernelRow(stage="vision", kernel="f 8", launches=1, us=3.0),
    ]
    assert made.span_us == {"vision": 17.5, "prompt": 0.0}


def test_names_lose_namespaces_and_arguments() -> None:
    assert short("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int, 2>(a, b)") == "CatArrayBatchedCopy"
    assert short("nvjet_sm90_tst_192x96_64x5_1x2_h_bz_TNT") == "nvjet_sm90_tst_192x96_64x5_1x2_h_bz_TNT"
