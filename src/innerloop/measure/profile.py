"""Where the device's time goes: kernels of each stage by their share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from innerloop.measure.record import KernelRow, KernelsRecord
from innerloop.measure.trace import Event

WORDS = re.compile(r"(?:void |\(anonymous namespace\)::|\w+::)|<.*|\(.*")


def kernels_record(found: Mapping[str, Sequence[Sequence[Event]]], fields: Mapping[str, Any]) -> KernelsRecord:
    """found: kernel events by stage, one list a decision (trace.profile_graphs). fields: the record's other fields."""
    rows = [row for stage, decisions in found.items() for row in _rows(stage, decisions)]
    spans = {stage: sum(map(_span, decisions)) / len(decisions) for stage, decisions in found.items()}
    return KernelsRecord(**fields, span_us=spans, rows=rows)


def short(name: str) -> str:
    """A kernel's name without namespaces, template and call arguments."""
    return WORDS.sub("", name) or name


def _rows(stage: str, decisions: Sequence[Sequence[Event]]) -> list[KernelRow]:
    times: dict[str, list[float]] = {}
    for event in (event for events in decisions for event in events):
        times.setdefault(_title(event), []).append(float(event["dur"]))
    rows = [
        KernelRow(stage=stage, kernel=name, launches=round(len(us) / len(decisions)), us=sum(us) / len(decisions))
        for name, us in times.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def _title(event: Event) -> str:
    grid = "x".join(str(size) for size in event.get("args", {}).get("grid", ()) if size != 1)
    return f"{short(str(event['name']))} {grid}".strip()


def _span(events: Sequence[Event]) -> float:
    if not events:
        return 0.0
    ends = [float(event["ts"]) + float(event["dur"]) for event in events]
    return max(ends) - min(float(event["ts"]) for event in events)
