"""Markdown tables from records."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from innerloop.contract import InnerloopError
from innerloop.measure.clock import SEVEN
from innerloop.measure.record import (
    USUAL_FRAMES,
    BatchRecord,
    CapsulesRecord,
    ControlRecord,
    KernelsRecord,
    LadderRecord,
    LatencyRecord,
    OperatorsRecord,
    PolicyRecord,
    Record,
    RefreshRecord,
    ServedRecord,
    SuccessRecord,
)
from innerloop.measure.svg import number

BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"
R = TypeVar("R", bound=Record)


def of_kind(records: Iterable[Record], schema: type[R]) -> list[R]:
    """Records of one schema, sorted so that tables come out the same whatever order they were given in."""
    return sorted((r for r in records if isinstance(r, schema)), key=_order)


def markdown(records: Sequence[Record]) -> str:
    """Every table the records have rows for, under headings."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections(records)) + "\n"


def sections(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Title and table of every kind that the records have rows for."""
    kinds: list[tuple[str, type[Record], Callable[[Any], str]]] = [
        ("Whole call", LatencyRecord, latency_table),
        ("Stages", LatencyRecord, stage_table),
        ("Ladder", LadderRecord, ladder_table),
        ("Batch", BatchRecord, batch_table),
        ("Control time", ControlRecord, control_table),
        ("Served", ServedRecord, served_table),
        ("What changed", RefreshRecord, refresh_table),
        ("Capsules", CapsulesRecord, capsules_table),
        ("Kernels", KernelsRecord, kernels_table),
        ("Operators", OperatorsRecord, operators_table),
        ("Closed-loop success", SuccessRecord, success_table),
    ]
    found = [(title, table(chosen)) for title, schema, table in kinds if (chosen := of_kind(records, schema))]
    return [*found, ("How these were measured", method_table(records))]


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the two markers of a document. Raises InnerloopError where a marker is missing."""
    page = path.read_text() if path.is_file() else ""
    if BEGIN not in page or END not in page:
        raise InnerloopError(f"{path} has no place for tables; add the lines '{BEGIN}' and '{END}'")
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def latency_table(records: Sequence[LatencyRecord]) -> str:
    """One row a record: the whole call, its launches, host share, and who it was compared with."""
    names = list(dict.fromkeys(name for record in records for name in record.against))
    head = ["policy", "device", "precision", "kernels", "cameras", "prompt", "chunk", "steps", "batch"]
    head += ["p50 ms", "p95", "p99", "max", "launches", "host", "GB"]
    head += [cell for name in names for cell in (f"{name} ms", "times", "cosine", "worst cosine", "max abs")]
    rows = []
    for r in records:
        row = [
            r.policy,
            r.device,
            r.precision,
            r.kernels,
            f"{r.views} x {r.frames}",
            f"{r.prompt_tokens} of {r.prompt_capacity}",
        ]
        row += [str(r.chunk), str(r.steps), str(r.batch), f"**{r.p50_ms:.2f}**", f"{r.p95_ms:.2f}", f"{r.p99_ms:.2f}"]
        row += [f"{r.max_ms:.2f}", f"{r.launches:,}", f"{r.host_share:.1%}", number(r.memory_bytes / 1e9)]
        for name in names:
            row += _against(r, name)
        rows.append(row)
    return table(head, rows)


def stage_table(records: Sequence[LatencyRecord]) -> str:
    """Seven rows a record: p50, p99, launches, work, bound, and the share of the measured roof; then what the whole
    call took beyond their sum."""
    head = ["policy", "stage", "p50 ms", "p99", "jitter", "launches", "GFLOP", "MB", "bound", "floor", "roof"]
    rows = []
    for r in records:
        for name in SEVEN:
            work = r.stages_bound[name] != "host"
            row = [_title(r), name, f"{r.stages[name]:.3f}", f"{r.stages_p99_ms[name]:.3f}"]
            row += [f"{r.stages_jitter_ms[name]:.3f}", f"{r.stages_launches[name]:,}"]
            row += [number(r.stages_flops[name] / 1e9), number(r.stages_bytes[name] / 1e6), r.stages_bound[name]]
            row += [f"{r.stages_floor_ms[name]:.3f}", f"{r.stages_roof_percent[name]:.0f} %"] if work else ["", ""]
            rows.append(row)
        rows.append([_title(r), "(in none)", f"{r.unattributed_ms:.3f}", *[""] * (len(head) - 3)])
    return table(head, rows)


def ladder_table(records: Sequence[LadderRecord]) -> str:
    """One row a rung."""
    head = ["policy", "rung", "p50 ms", "p99", "launches", "saved ms", "share", "cosine", "max abs"]
    rows = []
    for r in records:
        for rung in r.rungs:
            row = [_title(r), rung.name, f"{rung.p50_ms:.2f}", f"{rung.p99_ms:.2f}", f"{rung.launches:,}"]
            row += [f"{rung.saved_ms:.2f}", f"{rung.share:.0%}", f"{rung.cosine:.6f}", f"{rung.max_abs:.1e}"]
            rows.append(row)
    return table(head, rows)


def batch_table(records: Sequence[BatchRecord]) -> str:
    """One row a batch size."""
    stages = list(records[0].rows[0].stages)
    head = ["policy", "batch", "p50 ms", "p99", "ms a sample", "decisions/s", *(f"{name} share" for name in stages)]
    rows = []
    for r in records:
        for one in r.rows:
            whole = sum(one.stages.values())
            row = [_title(r), str(one.batch), f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", f"{one.per_sample_ms:.2f}"]
            rows.append([*row, f"{one.decisions_per_s:.1f}", *(f"{one.stages[n] / whole:.0%}" for n in stages)])
    return table(head, rows)


def control_table(records: Sequence[ControlRecord]) -> str:
    """One row a network delay and horizon."""
    head = ["policy", "latency ms", "delay ms", "horizon", "waiting, actions/s", "overlapped", "bound", "oldest ms"]
    rows = []
    for r in records:
        for one in r.rows:
            row = [_title(r), f"{r.latency_ms:.1f}", f"{one.delay_ms:g}", str(one.horizon), f"{one.synchronous_hz:.1f}"]
            rows.append([*row, f"{one.overlapped_hz:.1f}", one.bound, f"{one.oldest_observation_ms:.0f}"])
    return table(head, rows)


def served_table(records: Sequence[ServedRecord]) -> str:
    """One row a number of clients."""
    head = ["policy", "frames", "clients", "p50 ms", "p95", "p99", "max", "queue", "server", "wire", "decisions/s"]
    rows = []
    for r in records:
        for one in r.rows:
            times = (one.p50_ms, one.p95_ms, one.p99_ms, one.max_ms, one.queue_ms, one.server_ms, one.transport_ms)
            row = [_title(r), r.frames, str(one.clients), *(f"{ms:.2f}" for ms in times)]
            rows.append([*row, f"{one.decisions_per_s:.1f}"])
    return table(head, rows)


def refresh_table(records: Sequence[RefreshRecord]) -> str:
    """One row a set of changed inputs."""
    rows = [
        [_title(r), ", ".join(o.changed) or "nothing", ", ".join(o.refreshed), f"{o.p50_ms:.2f}", f"{o.p99_ms:.2f}"]
        for r in records
        for o in r.rows
    ]
    return table(["policy", "changed", "stages run", "p50 ms", "p99"], rows)


def capsules_table(records: Sequence[CapsulesRecord]) -> str:
    """One row a place."""
    head = ["policy", "to", "MB", "snapshot ms", "restore ms", "actions after"]
    rows = [
        [_title(r), place, number(r.bytes / 1e6), f"{ms:.3f}", f"{r.restore_ms[place]:.3f}", _same(r.identical)]
        for r in records
        for place, ms in r.snapshot_ms.items()
    ]
    return table(head, rows)


def kernels_table(records: Sequence[KernelsRecord]) -> str:
    """One row a kernel of each stage, largest first; what takes less than a hundredth of its stage is left out."""
    rows = []
    for r in records:
        for one in r.rows:
            share = one.us / max(sum(other.us for other in r.rows if other.stage == one.stage), 1e-9)
            if share >= 0.01:
                row = [_title(r), one.stage, f"`{one.kernel}`", f"{one.launches:,}", f"{one.us:.0f}"]
                rows.append([*row, f"{one.us / max(one.launches, 1):.2f}", f"{share:.0%}"])
    return table(["policy", "stage", "kernel and grid", "launches", "us", "us each", "share"], rows)


def operators_table(records: Sequence[OperatorsRecord]) -> str:
    """One row an operator and shape."""
    names = list(dict.fromkeys(name for r in records for one in r.rows for name in one.against_us))
    head = ["operator", "shape", "us", *(f"{name} us" for name in names), "MB", "GFLOP", "bound", "roof", "max abs"]
    rows = []
    for r in records:
        for one in r.rows:
            others = [f"{one.against_us[name]:.1f}" if name in one.against_us else "" for name in names]
            work = (f"{one.bytes / 1e6:.3g}", f"{one.flops / 1e9:.3g}")
            row = [one.operator, one.shape, f"{one.us:.1f}", *others, *work, one.bound, f"{one.roof_percent:.0f} %"]
            rows.append([*row, f"{one.max_abs:.1e}"])
    return table(head, rows)


def success_table(records: Sequence[SuccessRecord]) -> str:
    """One row a configuration."""
    head = ["policy", "engine", "precision", "task", "success", "95 % interval", "episodes"]
    head += ["mode", "executed", "steps", "delay ms", "seam", "waited"]
    rows = [
        [
            *(r.policy, r.engine, r.precision, r.task, f"{r.success:.1%}"),
            *(f"{r.interval_low:.1%} to {r.interval_high:.1%}", str(r.episodes), r.mode, f"{r.horizon} of {r.chunk}"),
            *(str(r.steps), f"{r.delay_ms:g}" + (f" to {r.delay_ms + r.jitter_ms:g}" if r.jitter_ms else "")),
            *("" if r.seam < 0 else f"{r.seam:.2f}", f"{r.waited:.0%}"),
        ]
        for r in records
    ]
    return table(head, rows)


def method_table(records: Sequence[Record]) -> str:
    """One row a record: what it takes to measure it again."""
    head = ["record", "device", "clocks", "versions", "weights", "inputs", "warm-up", "commit", "time", "command"]
    rows = []
    for r in sorted(records, key=_order):
        warm = ""
        if isinstance(r, LatencyRecord):
            warm = f"{r.warmup}, then {r.ticks}" + ("" if r.settled else " (not settled)")
        clocks = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in r.clocks.items())
        kept = {name: version for name, version in r.versions.items() if name not in ("os", "machine")}
        row = [f"{r.kind}: {_title(r)}", r.device, clocks, ", ".join(f"{n} {v}" for n, v in kept.items())]
        row += [r.weights[:12], r.inputs] if isinstance(r, PolicyRecord) else ["", ""]
        rows.append([*row, warm, _short(r.commit), r.time, f"`{r.command}`"])
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells that look like numbers are the writer's business."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _against(record: LatencyRecord, name: str) -> list[str]:
    if name not in record.against:
        return [""] * 5
    ms, found = record.against[name], record.agreement.get(name, {})
    figures = (("global_cosine", ".6f"), ("cosine", ".6f"), ("max_abs", ".1e"))  # older records lack the first
    alike = [f"{found[figure]:{form}}" if figure in found else "" for figure, form in figures]
    return [f"{ms:.1f}", f"{ms / record.p50_ms:.1f}x", *alike]


def _title(record: Record) -> str:
    if isinstance(record, LatencyRecord):
        size = f" x{record.batch}" if record.batch > 1 else ""
        frames = "" if record.frames == USUAL_FRAMES else f" of {record.frames}"
        sizes = f"{record.views} cam{frames}, {record.prompt_tokens} tok, {record.chunk}{size}"
        return f"{record.policy} {record.precision}, {sizes}"
    if isinstance(record, LadderRecord | BatchRecord | KernelsRecord):
        return f"{record.policy} {record.precision}, {record.views} cam, {record.prompt_tokens} tok, {record.chunk}"
    if isinstance(record, PolicyRecord | ServedRecord):
        return f"{record.policy} {record.precision}"
    return "operators"


def _same(identical: bool) -> str:
    return "identical" if identical else "differ"


def _short(commit: str) -> str:
    head, plus, dirty = commit.partition("+")
    return head if " " in head else head[:10] + plus + dirty


def _order(record: Record) -> tuple[Any, ...]:
    name = (record.policy, record.precision) if isinstance(record, PolicyRecord | ServedRecord) else ()
    sizes: tuple[int, ...] = ()
    if isinstance(record, LatencyRecord):
        sizes = (record.batch, record.views, record.prompt_tokens, record.chunk)
    return (record.kind, record.device, name, sizes, record.time)
