"""One self-contained HTML page of records: plots first, then the tables behind them. No script, nothing fetched."""

import html
from collections.abc import Mapping, Sequence

from innerloop.measure import plots, report
from innerloop.measure.clock import DEVICE_STAGES, SEVEN
from innerloop.measure.record import BatchRecord, ControlRecord, LadderRecord, LatencyRecord, Record, SuccessRecord
from innerloop.measure.svg import number

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --ink: #16181d; --soft: #5c6470; --rule: #e3e5e8; --card: #ffffff;
  --receive: #c3c9d1; --preprocess: #a3acb8; --transfer: #838e9c; --postprocess: #66717f;
  --vision: #2f6fde; --context: #0f9b8e; --action: #e07b21; --other: #b9a7d6;
  --s0: #2f6fde; --s1: #e07b21; --s2: #0f9b8e; --s3: #b1408f; --s4: #7a8b1f; --s5: #6b5bd2; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #eceef1; --soft: #9aa3af; --rule: #2b3038;
  --card: #1b1e24; --receive: #4a525e; --preprocess: #626c7a; --transfer: #7c8796; --postprocess: #98a3b1;
  --vision: #6a9df5; --context: #34c3b4; --action: #f19a4b; --other: #8b78b3;
  --s0: #6a9df5; --s1: #f19a4b; --s2: #34c3b4; --s3: #e07cc0; --s4: #b3c451; --s5: #a295f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 40px 24px 80px; max-width: 1120px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 44px 0 6px; }
p { color: var(--soft); max-width: 75ch; margin: 0 0 12px; }
figure { margin: 12px 0 0; padding: 16px; border: 1px solid var(--rule); border-radius: 8px; background: var(--card);
  overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 560px; max-width: 900px; height: auto; }
figcaption { color: var(--soft); font-size: 13px; margin-bottom: 8px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; }
.card { flex: 1 1 200px; border: 1px solid var(--rule); border-radius: 8px; background: var(--card);
  padding: 14px 16px; }
.card b { display: block; font-size: 26px; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin-bottom: 8px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 8px; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums;
  background: var(--card); }
th, td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; } code { font-size: 12px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); stroke: none; }
svg .label, svg .value { fill: var(--ink); }
svg .value { font-variant-numeric: tabular-nums; } svg .name { font-weight: 600; } svg .rule { stroke: var(--rule); }
svg .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg .thin { stroke-width: 1.2; stroke-dasharray: 4 3; }
svg polyline.roof { stroke: var(--soft); fill: none; }
svg .here { fill: var(--ink); } svg .other { fill: var(--other); }
"""


_STAGES = {name: name for name in SEVEN}  # each has a colour of its own name


def render(records: Sequence[Record], title: str = "innerloop measurements") -> str:
    """The whole page. Plots appear for the kinds of record that are there."""
    latency = report.of_kind(records, LatencyRecord)
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(_machines(records))}</p>"]
    if latency:
        parts += [_cards(latency), *_latency_figures(latency)]
    for one in report.of_kind(records, LadderRecord):
        parts.append(
            figure(f"Ladder: {one.policy}", "The same decisions through ever more of the engine.", plots.ladder(one))
        )
    for many in report.of_kind(records, BatchRecord):
        parts.append(figure(f"Batch: {many.policy}", "Decisions a second.", plots.batch_throughput(many)))
        parts.append(
            figure("", "Time a sample.", legend({name: name for name in DEVICE_STAGES}) + plots.batch_shares(many))
        )
    for loop in report.of_kind(records, ControlRecord):
        parts.append(figure(f"Control time: {loop.policy}", control_words(loop), plots.control(loop)))
    parts += _success_figures(report.of_kind(records, SuccessRecord))
    parts.append(tables(report.markdown(records)))
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of ready parts in the house's style."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}{_classes()}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _latency_figures(records: Sequence[LatencyRecord]) -> list[str]:
    caption = "From received bytes to actions in robot units, p50 of each stage. Grey is the host, colour the device."
    first, *slower = (legend(_STAGES) + plots.stage_bars(group) for group in plots.by_scale(records))
    figures = [figure("Where the time goes", caption, first)]
    figures += [figure("", "On another scale.", bars) for bars in slower]
    compared = [record for record in records if record.against]
    if compared:
        caption = "p50 of the whole call, same weights, inputs and noise, one run."
        figures.append(figure("Beside the others", caption, plots.against_bars(compared)))
    figures.append(_steadiness(records))
    groups: dict[tuple[str, str], list[LatencyRecord]] = {}
    for record in records:
        groups.setdefault((record.device, record.precision), []).append(record)
    for place, ((device, precision), group) in enumerate(groups.items()):
        words = f"{device}, {precision}: each stage of each record under the roof that was measured beside it."
        figures.append(figure("" if place else "How far from the roof", words, plots.roofline(group)))
    return figures


def _steadiness(records: Sequence[LatencyRecord]) -> str:
    if plots.few(records):
        caption = "Latency that the given share of calls stays within; a flat line is a steady policy."
        return figure("How steady it is", caption, plots.distribution(records))
    caption = "How much longer than p50 the slow calls take: short bars are a steady policy."
    return figure("How steady it is", caption, legend(plots.TAILS) + plots.tails(records))


def _success_figures(records: Sequence[SuccessRecord]) -> list[str]:
    """One for each policy that decided on the same episodes under several delays."""
    groups: dict[tuple[str, ...], list[SuccessRecord]] = {}
    for one in records:
        groups.setdefault((one.policy, one.fingerprint, one.engine, one.inputs), []).append(one)
    curves = [group for group in groups.values() if len({one.delay_ms for one in group}) > 1]
    return [
        figure(
            f"Success against delay: {group[0].policy}",
            f"{group[0].engine}, {group[0].precision}; the same {group[0].episodes} episodes at every point.",
            plots.success(group),
        )
        for group in curves
    ]


def alone(svg: str) -> str:
    """A chart as a file of its own, for documents."""
    style = f"<style>{_STYLE}{_classes()}svg{{background:var(--card)}}</style>"
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", ">" + style, 1) + "\n"


def _cards(records: Sequence[LatencyRecord]) -> str:
    best = min(records, key=lambda record: record.p50_ms)
    cards = [
        (f"{best.p50_ms:.2f} ms", f"p50, whole call: {plots.label(best)}"),
        (f"{best.p99_ms:.2f} ms", "p99 of the same"),
    ]
    cards.append((f"{best.host_share:.0%}", "of the call is host work"))
    for name, ms in best.against.items():
        cards.append((f"{number(ms / best.p50_ms)}x", f"faster than {name} ({number(ms)} ms)"))
    return '<div class="cards">' + "".join(card(value, words) for value, words in cards) + "</div>"


def card(value: str, words: str) -> str:
    """A figure and what it is."""
    return f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(words)}</span></div>'


def figure(title: str, caption: str, body: str) -> str:
    """A chart or picture under its heading."""
    head = f"<h2>{html.escape(title)}</h2>" if title else ""
    return f"{head}<figure><figcaption>{html.escape(caption)}</figcaption>{body}</figure>"


def legend(colours: Mapping[str, str]) -> str:
    """Names and the style sheet's colours that stand for them."""
    items = [f'<span><i style="background:var(--{colour})"></i>{name}</span>' for name, colour in colours.items()]
    return f'<div class="legend">{"".join(items)}</div>'


def control_words(record: ControlRecord) -> str:
    """The verdict in a sentence."""
    return (
        f"{record.horizon} of {record.chunk} actions executed at {number(record.control_hz)} Hz: {record.bound}-bound "
        f"at {number(record.latency_ms)} ms a call; the bound flips at {number(record.flip_ms)} ms."
    )


def _machines(records: Sequence[Record]) -> str:
    devices = sorted({record.device for record in records})
    times = sorted(record.time for record in records)
    return f"{len(records)} records on {', '.join(devices)}, {times[0]} to {times[-1]}."


def tables(text: str) -> str:
    """The report's Markdown as HTML: it holds headings and tables only."""
    parts, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("## "):
            parts.append(f"<h2>{html.escape(line[3:])}</h2>")
        elif line.startswith("|---"):
            continue
        elif line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            parts.append(_table(rows))
            rows = []
    return "".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    numeric = [all(is_number(row[index]) for row in rows[1:]) for index in range(len(rows[0]))]
    lines = []
    for place, row in enumerate(rows):
        tag = "th" if place == 0 else "td"
        cells = [
            f"<{tag}{' class=n' if right else ''}>{_cell(text)}</{tag}>"
            for text, right in zip(row, numeric, strict=True)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _cell(text: str) -> str:
    escaped = html.escape(text)
    if text.startswith("`"):
        return f"<code>{escaped.strip('`')}</code>"
    return f"<b>{escaped.strip('*')}</b>" if text.startswith("**") else escaped


def is_number(text: str) -> bool:
    """Whether a cell is a figure, to be set flush right."""
    bare = text.strip("*").rstrip("x%").replace(",", "").replace(" ", "")
    try:
        float(bare or "0")
    except ValueError:
        return False
    return True


def _classes() -> str:
    stages = "".join(f"svg .stage-{n}.fill{{fill:var(--{n})}}svg .stage-{n}.name{{fill:var(--{n})}}" for n in SEVEN)
    series = "".join(
        f"svg .s{i}.line{{stroke:var(--s{i})}}svg .s{i}.fill,svg .s{i}.name{{fill:var(--s{i})}}" for i in range(6)
    )
    return stages + series
