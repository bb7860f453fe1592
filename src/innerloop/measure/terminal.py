"""The report's tables on a terminal: one row is shown upright, columns that never change become a caption."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from innerloop.measure import report
from innerloop.measure.page import is_number
from innerloop.measure.record import Record
from innerloop.measure.reproduce import Difference

_TIGHT: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0), "pad_edge": False, "header_style": "bold"}
_MARKS = {True: "within the spread", False: "outside the spread", None: ""}


def show(records: Sequence[Record], out: Console) -> None:
    """Every table of the records, then how the first was measured."""
    *figures, _ = report.sections(records)
    for title, text in [*figures, report.sections(records[:1])[-1]]:
        out.print(rich_table(title, text), "")


def rich_table(title: str, text: str) -> Table:
    """A Markdown table for the terminal."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    rows = [[cell.strip("*`") for cell in row] for row in rows]
    return _upright(title, head, rows[0]) if len(rows) == 1 else _lying(title, head, rows)


def difference_table(rows: Sequence[Difference]) -> Table:
    """Then and now."""
    table = Table(title="then and now", title_justify="left", **_TIGHT)
    for name in ("figure", "then", "now", "change", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for row in rows:
        change = "" if row.change_percent is None else f"{row.change_percent:+.1f} %"
        table.add_row(row.figure, row.then, row.now, change, _MARKS[row.within])
    return table


def _upright(title: str, head: Sequence[str], row: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, **_TIGHT)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, cell in zip(head, row, strict=True):
        table.add_row(name, cell)
    return table


def _lying(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    fixed = [place for place in range(len(head)) if not is_number(rows[0][place]) and _same(rows, place)]
    words = ", ".join(f"{head[place]} {rows[0][place]}" for place in fixed if rows[0][place])
    table = Table(title=f"{title}: {words}" if words else title, title_justify="left", **_TIGHT)
    shown = [place for place in range(len(head)) if place not in fixed]
    for place in shown:
        right = all(is_number(row[place]) for row in rows)
        table.add_column(head[place], justify="right" if right else "left", no_wrap=right)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    return table


def _same(rows: Sequence[Sequence[str]], place: int) -> bool:
    return len({row[place] for row in rows}) == 1
