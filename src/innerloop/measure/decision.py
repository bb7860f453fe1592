"""A chunk for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from innerloop.contract import Chunk

SHOWN = 10  # rows of a chunk that a terminal shows


def as_json(chunk: Chunk) -> dict[str, Any]:
    """Actions, timing in milliseconds, receipt."""
    return {
        "actions": chunk.actions.tolist(),
        "timing": {name: round(ms, 4) for name, ms in chunk.timing.items()},
        "receipt": None if chunk.receipt is None else asdict(chunk.receipt),
    }


def tables(chunk: Chunk) -> Group:
    """Actions, timing and receipt as rich tables."""
    horizon, dims = chunk.actions.shape
    actions = Table(title=f"actions [{horizon} x {dims}], robot units", title_justify="left")
    actions.add_column("step", justify="right")
    for d in range(dims):
        actions.add_column(str(d), justify="right")
    for step, row in enumerate(chunk.actions[:SHOWN]):
        actions.add_row(str(step), *(f"{x:+.4f}" for x in row))
    if horizon > SHOWN:
        actions.caption = f"the first {SHOWN} of {horizon} steps"
    return Group(actions, timing_table(chunk.timing), receipt_table(chunk))


def timing_table(timing: dict[str, float]) -> Table:
    """Milliseconds by stage."""
    table = Table(title="timing", title_justify="left")
    table.add_column("stage")
    table.add_column("ms", justify="right")
    for name, ms in timing.items():
        table.add_row(name, f"{ms:.3f}")
    return table


def receipt_table(chunk: Chunk) -> Table:
    """What really ran."""
    table = Table(title="receipt", title_justify="left", show_header=False)
    for name, value in ({} if chunk.receipt is None else asdict(chunk.receipt)).items():
        table.add_row(name, _words(value))
    return table


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items())
    return str(value)
