"""A record measured again: is it within the spread that the record printed?"""

from dataclasses import dataclass

from innerloop.contract import InnerloopError
from innerloop.measure.record import LatencyRecord


@dataclass(frozen=True)
class Difference:
    """One figure then and now; `within`: inside the record's own 1st to 99th percentile, where it has one."""

    figure: str
    then: str
    now: str
    change_percent: float | None
    within: bool | None


def differences(then: LatencyRecord, now: LatencyRecord) -> list[Difference]:
    """Every figure and every circumstance that changed. Raises InnerloopError when the inputs are not the same."""
    if then.inputs != now.inputs:
        raise InnerloopError(
            f"the record's inputs have the digest {then.inputs}, this run's {now.inputs}; use the record's own command"
        )
    low, high = then.quantiles_ms["1"], then.quantiles_ms["99"]
    rows = [_figure("p50 ms", then.p50_ms, now.p50_ms, low <= now.p50_ms <= high)]
    rows += [_figure(f"{name} ms", getattr(then, f"{name}_ms"), getattr(now, f"{name}_ms")) for name in ("p99", "max")]
    rows += [_figure(f"{name} ms", ms, now.stages[name]) for name, ms in then.stages.items()]
    rows.append(_figure("launches", then.launches, now.launches))
    changed = [("device", then.device, now.device), ("fingerprint", then.fingerprint, now.fingerprint)]
    changed.append(("commit", then.commit, now.commit))
    names = sorted({*then.versions, *now.versions})
    changed += [(name, then.versions.get(name, "absent"), now.versions.get(name, "absent")) for name in names]
    return rows + [Difference(name, old, new, None, None) for name, old, new in changed if old != new]


def reproduced(rows: list[Difference]) -> bool:
    """Whether every figure that has a spread is within it."""
    return all(row.within is not False for row in rows)


def _figure(name: str, then: float, now: float, within: bool | None = None) -> Difference:
    change = 100 * (now - then) / then if then else None
    return Difference(name, f"{then:.3f}", f"{now:.3f}", change, within)
