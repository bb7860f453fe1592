"""Kernels a decision launches, counted by the profiler, and Chrome traces to look at."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_COUNTED = 3  # decisions in a count


def write_trace(run: Callable[[], object], path: Path, decisions: int = _COUNTED) -> None:
    """Profile some decisions into a Chrome / Perfetto trace file. Run warm."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(decisions):
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def count_launches(run: Callable[[], object]) -> int:
    """Kernels one decision launches on the GPU, those inside CUDA graphs included; copies are not kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(run, path)
        events = json.loads(path.read_text())["traceEvents"]
    return round(len(kernels(events)) / _COUNTED)


def count_launches_by_stage(run: Callable[[], object], stages: list[str]) -> dict[str, int]:
    """The same by stage, where each stage runs inside a profiler range of its own name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(run, path)
        events = json.loads(path.read_text())["traceEvents"]
    counts = launches_in_ranges(events, stages)
    return {stage: round(counts[stage] / _COUNTED) for stage in stages}


def kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernel events of a Chrome trace."""
    return [event for event in events if event.get("cat") == "kernel"]


def launches_in_ranges(events: list[dict[str, Any]], names: list[str]) -> Counter[str]:
    """Kernels by the named host range that launched them, joined through the correlation of launch and kernel."""
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event.get("name") in names]
    launch_time = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    counts: Counter[str] = Counter()
    for event in kernels(events):
        launched = launch_time.get(event["args"].get("correlation"))
        for span in ranges:
            if launched is not None and span["ts"] <= launched <= span["ts"] + span["dur"]:
                counts[span["name"]] += 1
    return counts
