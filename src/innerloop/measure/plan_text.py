"""A plan for people: a table, or one self-contained page with the plan as a picture."""

import html
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

CLOCK_COLOURS = {"checkpoint": "#6b7280", "prompt": "#7c3aed", "observation": "#2563eb", "step": "#d97706"}
_ALWAYS = {"checkpoint": "never: it follows from the weights", "step": "at every decision"}
ROLE_ORDER = ("input", "static", "state", "scratch", "output")


def tables(manifest: Mapping[str, Any]) -> Group:
    """Stages and buffers of a manifest as two rich tables."""
    stages = Table(title=f"plan {manifest['name']}", title_justify="left")
    for column in ("stage", "clock", "reads", "writes"):
        stages.add_column(column)
    for s in manifest["stages"]:
        stages.add_row(s["name"], s["clock"], ", ".join(s["reads"]), ", ".join(s["writes"]))
    buffers = Table(title="buffers", title_justify="left")
    for column in ("buffer", "role", "dtype", "shape"):
        buffers.add_column(column)
    buffers.add_column("bytes", justify="right")
    for b in sorted(manifest["buffers"], key=lambda b: ROLE_ORDER.index(b["role"])):
        buffers.add_row(b["name"], b["role"], b["dtype"], "x".join(map(str, b["shape"])), f"{b['bytes']:,}")
    totals = {r: sum(b["bytes"] for b in manifest["buffers"] if b["role"] == r) for r in ROLE_ORDER}
    buffers.caption = ", ".join(f"{role} {size:,}" for role, size in totals.items() if size)
    return Group(stages, buffers)


def timed(manifest: Mapping[str, Any], milliseconds: Mapping[str, float]) -> Table:
    """Stages with their clocks and their share of one decision; `milliseconds` has no entry for what runs once."""
    table = Table(title="stages, when everything has changed", title_justify="left")
    for column in ("stage", "runs again when these change"):
        table.add_column(column)
    table.add_column("ms", justify="right")
    first = {name.partition("+")[0]: (name, ms) for name, ms in milliseconds.items()}
    merged = {part: name for name in milliseconds for part in name.split("+")[1:]}
    for stage in manifest["stages"]:
        name, again = stage["name"], _ALWAYS.get(stage["clock"]) or ", ".join(_inputs(manifest, stage["name"]))
        ms = f"{first[name][1]:.2f}" if name in first else f"in {merged[name]}" if name in merged else "at load"
        table.add_row(name, again, ms)
    return table


def _inputs(manifest: Mapping[str, Any], name: str) -> list[str]:
    """The windows that a stage depends on, directly or through others."""
    given = {b["name"] for b in manifest["buffers"] if b["role"] == "input"}
    reads = next(stage["reads"] for stage in manifest["stages"] if stage["name"] == name)
    found = [read for read in reads if read in given]
    for edge in manifest["edges"]:
        if edge["to"] == name:
            found += _inputs(manifest, edge["from"])
    return list(dict.fromkeys(found))


def flat(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Details as lines: a mapping's entries under dotted names, lists without their brackets, nothing for nothing."""
    for name, value in details.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", words) for key, words in flat(value))
        elif isinstance(value, list | tuple):
            yield from [(name, ", ".join(map(str, value)))] if value else []
        elif value is not None:
            yield name, str(value)


def lines(details: Mapping[str, Any]) -> str:
    """Details for a terminal, in rich's markup."""
    return "\n".join(f"[bold]{name}[/]  {escape(words)}" for name, words in flat(details))


def page(manifest: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """A self-contained HTML page: the plan drawn as stages in columns with buffers between them."""
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in flat(details))
    legend = "".join(f'<span style="--c:{c}">{k}</span>' for k, c in CLOCK_COLOURS.items())
    buffers = "".join(
        f"<tr><td>{b['name']}</td><td>{b['role']}</td><td>{b['dtype']}</td>"
        f"<td>{' x '.join(map(str, b['shape']))}</td><td class=n>{b['bytes']:,}</td></tr>"
        for b in manifest["buffers"]
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(manifest['name'])}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(manifest['name'])}</h1><p class=legend>{legend}</p>{_drawing(manifest)}"
        f"<h2>Checkpoint</h2><table>{rows}</table>"
        f"<h2>Buffers</h2><table><tr><th>name<th>role<th>dtype<th>shape<th class=n>bytes</tr>{buffers}</table></html>"
    )


def _depths(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Column of each stage: one past the furthest stage it reads from."""
    depths: dict[str, int] = {}
    for stage in manifest["stages"]:
        before = [depths[e["from"]] for e in manifest["edges"] if e["to"] == stage["name"]]
        depths[stage["name"]] = 1 + max(before, default=-1)
    return depths


def _drawing(manifest: Mapping[str, Any]) -> str:
    depths = _depths(manifest)
    inputs = [b for b in manifest["buffers"] if b["role"] == "input"]
    columns: dict[int, list[str]] = {}
    for name, depth in depths.items():
        columns.setdefault(depth, []).append(name)
    tall = max(len(inputs), *(len(c) for c in columns.values()))
    width, height = 190 + 230 * (len(columns) + 1), 90 * tall + 20
    places: dict[str, tuple[float, float]] = {}
    for i, b in enumerate(inputs):
        places[b["name"]] = (10, height * (i + 0.5) / len(inputs))
    for depth, names in columns.items():
        for i, name in enumerate(names):
            places[name] = (210 + 230 * depth, height * (i + 0.5) / len(names))
    places["actions"] = (210 + 230 * len(columns), height / 2)
    return f'<svg viewBox="0 0 {width} {height}" role=img>{_lines(manifest, places)}{_boxes(manifest, places)}</svg>'


def _lines(manifest: Mapping[str, Any], places: Mapping[str, tuple[float, float]]) -> str:
    wires: dict[tuple[str, str], list[str]] = {}
    for edge in manifest["edges"]:
        wires.setdefault((edge["from"], edge["to"]), []).append(edge["buffer"])
    for stage in manifest["stages"]:
        for name in stage["reads"]:
            if name in places:
                wires.setdefault((name, stage["name"]), []).append(name)
        if "actions" in stage["writes"]:
            wires[stage["name"], "actions"] = ["actions"]
    drawn = []
    for (a, b), names in wires.items():
        (x1, y1), (x2, y2) = places[a], places[b]
        x1 += 150
        bend = (x1 + x2) / 2
        drawn.append(f'<path d="M{x1} {y1}C{bend} {y1} {bend} {y2} {x2} {y2}"><title>{", ".join(names)}</title></path>')
    return "".join(drawn)


def _boxes(manifest: Mapping[str, Any], places: Mapping[str, tuple[float, float]]) -> str:
    clocks = {s["name"]: s["clock"] for s in manifest["stages"]}
    clocks |= {b["name"]: b["clock"] or "step" for b in manifest["buffers"] if b["name"] in places}
    kinds = {b["name"]: b["role"] for b in manifest["buffers"]}
    drawn = []
    for name, (x, y) in places.items():
        colour, kind = CLOCK_COLOURS[clocks[name]], kinds.get(name, clocks[name])
        shape = "stage" if name not in kinds else "buffer"
        drawn.append(
            f'<g class={shape} style="--c:{colour}" transform="translate({x} {y - 24})"><rect width=150 height=48 rx=6 />'
            f"<text x=75 y=20>{html.escape(name)}</text><text x=75 y=37 class=k>{kind}</text></g>"
        )
    return "".join(drawn)


_STYLE = """
:root{color-scheme:light dark;--ink:#111827;--paper:#fff;--line:#9ca3af}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--paper:#111827;--line:#6b7280}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;max-width:1200px;
padding:0 1rem}svg{width:100%;height:auto}path{fill:none;stroke:var(--line);stroke-width:1.5}
rect{fill:var(--paper);stroke:var(--c);stroke-width:2}.buffer rect{stroke-dasharray:5 3}
text{fill:var(--ink);text-anchor:middle;font-size:14px}.k{font-size:11px;opacity:.7}
.legend span{margin-right:1rem}.legend span:before{content:"";display:inline-block;width:.8em;height:.8em;
background:var(--c);margin-right:.3em;border-radius:2px}
table{border-collapse:collapse}td,th{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line)}
.n{text-align:right;font-variant-numeric:tabular-nums}
"""
