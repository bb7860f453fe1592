"""Charts of records."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from innerloop.measure.clock import DEVICE_STAGES, SEVEN
from innerloop.measure.control import horizons, recorded_loop
from innerloop.measure.record import (
    USUAL_FRAMES,
    BatchRecord,
    ControlRecord,
    LadderRecord,
    LatencyRecord,
    SuccessRecord,
)
from innerloop.measure.svg import Axis, Bar, Line, Segment, bar_chart, line_chart, number

_SERIES = 6  # line colours of the style sheet: s0 to s5
_SCALE = 8.0  # beside a call that is longer by more than this, a bar says nothing of its stages
TAILS = {"p95": "s0", "p99": "s2", "longest": "s1"}
_TAIL = ((0.5, "p50"), (0.1, "p90"), (0.05, "p95"), (0.01, "p99"), (0.001, "p99.9"))


def label(record: LatencyRecord) -> str:
    """A row's name: policy, cameras, their frames where unusual, prompt, chunk, batch."""
    batch = f", batch {record.batch}" if record.batch > 1 else ""
    return f"{record.policy} {_cameras(record)}, {record.prompt_tokens} tok, chunk {record.chunk}{batch}"


def _cameras(record: LatencyRecord) -> str:
    return f"{record.views} cam" + ("" if record.frames == USUAL_FRAMES else f" of {record.frames}")


def by_scale(records: Sequence[LatencyRecord]) -> list[list[LatencyRecord]]:
    """Records that one linear scale can show, the quickest first; within a group in the order given."""
    least: list[float] = []  # milliseconds of each group
    for ms in sorted(record.p50_ms for record in records):
        if not least or ms > _SCALE * least[-1]:
            least.append(ms)
    groups: list[list[LatencyRecord]] = [[] for _ in least]
    for record in records:
        groups[bisect_right(least, record.p50_ms) - 1].append(record)
    return groups


def stage_bars(records: Sequence[LatencyRecord]) -> str:
    """The seven stages of each record as one stacked bar."""
    bars = [Bar(label(record), [Segment(n, record.stages[n], f"stage-{n}") for n in SEVEN]) for record in records]
    return bar_chart(bars, "ms", "Milliseconds a decision by stage")


def against_bars(records: Sequence[LatencyRecord]) -> str:
    """Each record's whole call beside those it was compared with."""
    bars = []
    for record in records:
        bars.append(Bar(label(record), [Segment("innerloop", record.p50_ms, "s0")]))
        bars += [
            Bar(name, [Segment(name, ms, "other")], f"{number(ms)}, {number(ms / record.p50_ms)}x")
            for name, ms in record.against.items()
        ]
    return bar_chart(bars, "ms", "Milliseconds a decision beside other implementations")


def distribution(records: Sequence[LatencyRecord]) -> str:
    """Latency against the share of calls that take longer: a flat line is a steady policy."""
    lines = []
    for index, record in enumerate(records):
        points = [(1 / max(1 - float(p) / 100, 1e-3), ms) for p, ms in record.quantiles_ms.items()]
        short = f"{record.policy} {_cameras(record)} {record.prompt_tokens} tok"
        lines.append(Line(short, points, f"s{index % _SERIES}"))
    top = max(record.max_ms for record in records)
    x = Axis("share of calls within", 1.0, 1e3, log=True, marks=[(1 / share, name) for share, name in _TAIL])
    return line_chart(lines, x, Axis("ms", 0.0, top * 1.05), "Latency distribution")


def tails(records: Sequence[LatencyRecord]) -> str:
    """How much longer than p50 the slow calls of each record take, per cent: as many records as there are."""
    bars = []
    for record in records:
        over = [100.0 * (ms / record.p50_ms - 1.0) for ms in (record.p95_ms, record.p99_ms, record.max_ms)]
        steps = [over[0], over[1] - over[0], over[2] - over[1]]
        segments = [Segment(n, step, style) for (n, style), step in zip(TAILS.items(), steps, strict=True)]
        bars.append(Bar(label(record), segments, f"p99 +{over[1]:.1f}, longest +{over[2]:.1f}"))
    return bar_chart(bars, "% longer than p50", "How much longer the slow calls take")


def few(records: Sequence[LatencyRecord]) -> bool:
    """Whether one chart can show each record as a line of its own colour."""
    return len(records) <= _SERIES and len(by_scale(records)) == 1


def roofline(records: Sequence[LatencyRecord]) -> str:
    """Device stages of records of one device and precision, between its measured copy and matrix rates."""
    rate = _rate_name(records[0])
    matrix = max(record.ceilings[rate] for record in records)
    copy = max(record.ceilings["copy_gb_s"] for record in records) / 1e3
    ridge = matrix / copy
    work = {stage: [point for record in records for point in _points(record, stage)] for stage in DEVICE_STAGES}
    every = [point for points in work.values() for point in points]
    intensities = [ridge, *(intensity for intensity, _, _ in every)]
    x = Axis("flops a byte", min(intensities) / 4, max(intensities) * 6, log=True)
    y = Axis("TFLOP/s", min([copy * x.low, *(reached for _, reached, _ in every)]) / 2, matrix * 2, log=True)
    roof = [(x.low, copy * x.low), (ridge, matrix), (x.high, matrix)]
    lines = [Line(f"roof, {rate.split('_')[1]}", roof, "roof")]
    for stage, points in work.items():
        if points:
            at, tips = [point[:2] for point in points], [point[2] for point in points]
            lines.append(Line(stage, at, f"stage-{stage}", joined=False, tips=tips))
    return line_chart(lines, x, y, "Roofline")


def _points(record: LatencyRecord, stage: str) -> list[tuple[float, float, str]]:
    """Flops a byte, TFLOP/s and words of one stage; nothing where it has no work."""
    flops, moved, ms = record.stages_flops[stage], record.stages_bytes[stage], record.stages[stage]
    if not (flops and moved and ms):
        return []
    intensity, reached = flops / moved, flops / ms / 1e9
    words = f"{label(record)}, {stage}: {number(reached)} TFLOP/s at {number(intensity)} flops a byte"
    return [(intensity, reached, words)]


def ladder(record: LadderRecord) -> str:
    """Each rung's p50."""
    first = record.rungs[0].p50_ms
    bars = [
        Bar(
            rung.name,
            [Segment(rung.name, rung.p50_ms, "s0")],
            number(rung.p50_ms) + (f", {number(first / rung.p50_ms)}x faster" if rung.p50_ms < first else ""),
        )
        for rung in record.rungs
    ]
    return bar_chart(bars, "ms", "Optimisation ladder")


def batch_throughput(record: BatchRecord) -> str:
    """Decisions a second and p50 by batch size."""
    rows = record.rows
    points = [(float(row.batch), row.decisions_per_s) for row in rows]
    tips = [f"batch {r.batch}: {number(r.decisions_per_s)} /s, p50 {number(r.p50_ms)} ms" for r in rows]
    marks = [(float(row.batch), str(row.batch)) for row in rows]
    x = Axis("batch", rows[0].batch, max(rows[-1].batch, rows[0].batch + 1), log=True, marks=marks)
    y = Axis("decisions a second", 0.0, max(rate for _, rate in points) * 1.1)
    return line_chart([Line(record.policy, points, "s0", dots=True, tips=tips)], x, y, "Throughput by batch", 280)


def batch_shares(record: BatchRecord) -> str:
    """Milliseconds a sample by device stage and batch size."""
    bars = []
    for row in record.rows:
        segments = [Segment(name, row.stages[name] / row.batch, f"stage-{name}") for name in DEVICE_STAGES]
        bars.append(Bar(f"batch {row.batch}", segments))
    return bar_chart(bars, "ms a sample, on the device", "Stage shares by batch")


def control(record: ControlRecord) -> str:
    """Attained action rate against latency: flat where the robot is the limit, falling where the policy is."""
    loop = recorded_loop(record)
    low, high = min(record.latency_ms / 4, 1.0), max(record.latency_ms * 20, loop.execution_ms * 4)
    latencies = [low * (high / low) ** (index / 80) for index in range(81)]
    shown = sorted({loop.horizon, *horizons(loop.chunk)[-3:]})
    lines = []
    for index, horizon in enumerate(shown):
        at = [replace(loop, horizon=horizon, latency_ms=latency) for latency in latencies]
        style = f"s{index % _SERIES}"
        over = list(zip(latencies, [one.overlapped_hz for one in at], strict=True))
        wait = list(zip(latencies, [one.synchronous_hz for one in at], strict=True))
        lines += [
            Line(f"{horizon} actions, overlapped", over, style),
            Line(f"{horizon}, waiting", wait, f"{style} thin"),
        ]
    tip = f"measured {number(record.latency_ms)} ms: {number(record.overlapped_hz)} actions/s, {record.bound}-bound"
    here = [(record.latency_ms, record.overlapped_hz)]
    lines.append(Line("", here, "here", joined=False, tips=[tip]))
    y = Axis("actions a second", 0.0, max(1e3 / loop.step_ms, 1e-6) * 1.1)
    return line_chart(lines, Axis("latency of a call, ms", low, high, log=True), y, "Control-time roofline")


def success(records: Sequence[SuccessRecord]) -> str:
    """Success against injected delay, a line a way of executing; the interval of each point is in its words."""
    ways: dict[tuple[str, int], list[SuccessRecord]] = {}
    for record in sorted(records, key=lambda one: one.delay_ms):
        ways.setdefault((record.mode, record.horizon), []).append(record)
    lines = []
    for index, ((mode, horizon), along) in enumerate(ways.items()):
        name = f"{mode}, {horizon} actions"
        points = [(one.delay_ms, 100 * one.success) for one in along]
        tips = [
            f"{name}, {one.delay_ms:g} ms: {one.successes} of {one.episodes}, "
            f"{one.interval_low:.0%} to {one.interval_high:.0%}"
            for one in along
        ]
        lines.append(Line(name, points, f"s{index % _SERIES}", dots=True, tips=tips))
    latest = max(record.delay_ms for record in records)
    x = Axis("injected delay, ms", 0.0, max(latest, 1.0))
    return line_chart(lines, x, Axis("episodes solved, %", 0.0, 105.0), "Success against delay")


def _rate_name(record: LatencyRecord) -> str:
    wanted = f"matrix_{record.precision}_tflops"
    return wanted if wanted in record.ceilings else f"matrix_{record.dtype}_tflops"
