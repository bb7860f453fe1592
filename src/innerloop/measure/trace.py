"""Kernels a decision launches, counted by the profiler, and Chrome traces to look at."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from innerloop.contract import InnerloopError

COUNTED = 3  # decisions in a count
LONG = 100.0  # milliseconds of a decision whose kernels are tens of thousands
Event = dict[str, Any]


def write_trace(run: Callable[[], object], path: Path, decisions: int = COUNTED, host: bool = True) -> None:
    """Profile some decisions into a Chrome / Perfetto trace file. Run warm. host: its events too, many where eager."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] * (host or not on_gpu) + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, acc_events=True) as profiler:  # without acc_events the profiler warns
        for _ in range(decisions):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def count_launches(run: Callable[[], object]) -> int:
    """Kernels one decision launches on the GPU, those inside CUDA graphs included; copies are not kernels."""
    return len(kernels(_events(run, 1, host=False)))


def profile_graphs(
    run: Callable[[], object], graphs: Sequence[str], milliseconds: float
) -> dict[str, list[list[Event]]]:
    """Kernel events by graph, one list a decision, where every decision replays `graphs` once each, in this order.

    milliseconds: of a decision; where it takes long, and so has many kernels, one is looked at in place of three.
    """
    return events_by_graph(_events(run, 1 if milliseconds > LONG else COUNTED), graphs)


def kernels(events: Sequence[Event]) -> list[Event]:
    """The kernel events of a Chrome trace."""
    return [event for event in events if event.get("cat") == "kernel"]


def events_by_graph(events: Sequence[Event], graphs: Sequence[str]) -> dict[str, list[list[Event]]]:
    """Joined through the correlation number of a graph's launch and its kernels.

    Raises InnerloopError when the launches are not a whole number of decisions.
    """
    launches = [
        e for e in events if str(e.get("name")).startswith("cudaGraphLaunch") and "correlation" in e.get("args", {})
    ]
    launches.sort(key=lambda event: float(event["ts"]))
    if not launches or len(launches) % len(graphs):
        raise InnerloopError(
            f"the profiler saw {len(launches)} graph launches, no multiple of {len(graphs)}: other work shares the "
            "process or CUPTI is off; measure in a process of its own"
        )
    found: dict[str, list[list[Event]]] = {graph: [] for graph in graphs}
    owner: dict[int, list[Event]] = {}
    for place, launch in enumerate(launches):
        own = owner.setdefault(launch["args"]["correlation"], [])
        found[graphs[place % len(graphs)]].append(own)
    for event in kernels(events):
        owner.get(event["args"].get("correlation"), []).append(event)
    if not any(map(any, found.values())):
        raise InnerloopError(
            f"none of the {len(kernels(events))} kernels in the profile belongs to a graph launch; "
            "this driver's CUPTI does not trace inside graphs, so launches cannot be counted"
        )
    return found


def _events(run: Callable[[], object], decisions: int = COUNTED, host: bool = True) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(run, path, decisions, host)
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events
