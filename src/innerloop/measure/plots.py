"""Charts of records."""

from collections.abc import Sequence

from innerloop.measure.clock import DEVICE_STAGES, SEVEN
from innerloop.measure.control import ControlLoop, horizons
from innerloop.measure.record import BatchRecord, ControlRecord, LadderRecord, LatencyRecord
from innerloop.measure.svg import Axis, Bar, Line, Segment, bar_chart, line_chart, number

_SERIES = 6  # line colours of the style sheet: s0 to s5
_TAIL = ((0.5, "p50"), (0.1, "p90"), (0.05, "p95"), (0.01, "p99"), (0.001, "p99.9"))


def label(record: LatencyRecord) -> str:
    """A row's name: policy, cameras, prompt, chunk, batch."""
    batch = f", batch {record.batch}" if record.batch > 1 else ""
    return f"{record.policy} {record.views} cam, {record.prompt_tokens} tok, chunk {record.chunk}{batch}"


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
        short = f"{record.policy} {record.views} cam {record.prompt_tokens} tok"
        lines.append(Line(short, points, f"s{index % _SERIES}"))
    top = max(record.max_ms for record in records)
    x = Axis("share of calls within", 1.0, 1e3, log=True, marks=[(1 / share, name) for share, name in _TAIL])
    return line_chart(lines, x, Axis("ms", 0.0, top * 1.05), "Latency distribution")


def roofline(record: LatencyRecord) -> str:
    """Device stages between the measured copy and matrix rates."""
    peak = max(value for name, value in record.ceilings.items() if name.startswith("matrix_"))
    dtype = _rate_name(record)
    matrix, copy = record.ceilings[dtype], record.ceilings["copy_gb_s"] / 1e3
    points = []
    for name in DEVICE_STAGES:
        flops, moved, ms = record.stages_flops[name], record.stages_bytes[name], record.stages[name]
        if flops > 0 and moved > 0 and ms > 0:
            points.append((name, flops / moved, flops / ms / 1e9))
    intensities = [intensity for _, intensity, _ in points]
    rates = [rate for _, _, rate in points]
    ridge = matrix / copy
    x = Axis("flops a byte", min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 6, log=True)
    y = Axis("TFLOP/s", min([*rates, copy * x.low]) / 2, peak * 2, log=True)
    roof = [(x.low, copy * x.low), (ridge, matrix), (x.high, matrix)]
    lines = [Line(f"roof, {dtype.split('_')[1]}", roof, "roof")]
    for name, intensity, rate in points:
        tip = f"{name}: {number(rate)} TFLOP/s at {number(intensity)} flops a byte"
        lines.append(Line(name, [(intensity, rate)], f"stage-{name}", joined=False, tips=[tip]))
    return line_chart(lines, x, y, "Roofline")


def ladder(record: LadderRecord) -> str:
    """Each rung's p50."""
    first = record.rungs[0].p50_ms
    bars = [
        Bar(
            rung.name,
            [Segment(rung.name, rung.p50_ms, "s0")],
            f"{number(rung.p50_ms)}, {number(first / rung.p50_ms)}x faster",
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
    loop = ControlLoop(
        chunk=record.chunk,
        horizon=record.horizon,
        control_hz=record.control_hz,
        environment_ms=record.environment_ms,
        delay_ms=record.delay_ms,
        latency_ms=record.latency_ms,
    )
    low, high = min(record.latency_ms / 4, 1.0), max(record.latency_ms * 20, loop.execution_ms * 4)
    latencies = [low * (high / low) ** (index / 80) for index in range(81)]
    shown = sorted({loop.horizon, *horizons(loop.chunk)[-3:]})
    lines = []
    for index, horizon in enumerate(shown):
        at = [_loop(loop, horizon, latency) for latency in latencies]
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


def _loop(loop: ControlLoop, horizon: int, latency_ms: float) -> ControlLoop:
    return ControlLoop(loop.chunk, horizon, loop.control_hz, loop.environment_ms, loop.delay_ms, latency_ms)


def _rate_name(record: LatencyRecord) -> str:
    wanted = f"matrix_{record.precision}_tflops"
    return wanted if wanted in record.ceilings else f"matrix_{record.dtype}_tflops"
