"""Where every buffer lives: one region a role, aligned offsets, and scratch that shares bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from innerloop.contract.buffer import Buffer, Role
from innerloop.contract.errors import PlanError
from innerloop.contract.plan import CLOCKS, Plan, same_buffers

ALIGN = 256  # bytes; the alignment of the largest vector load, of TMA descriptors and of a 64 x int32 checksum row

Span = tuple[int, int]


def aligned(size: int) -> int:
    """Size rounded up to the alignment, in bytes."""
    return -(-size // ALIGN) * ALIGN


def sources(plan: Plan) -> dict[str, frozenset[str]]:
    """Stage name -> the inputs that reach it. Two stages with equal sources are always due together."""
    reach: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in plan.ticks}
    found: dict[str, frozenset[str]] = {}
    for stage in plan.stages:
        found[stage.name] = frozenset().union(*(reach[name] for name in stage.reads))
        for name in stage.writes:
            reach[name] = found[stage.name]
    return found


@dataclass(frozen=True)
class Layout:
    """Offsets inside regions; pure arithmetic, nothing is allocated.

    The `state` region holds all a session owns: every STATE buffer, and the STATIC ones that depend on inputs.
    """

    buffers: Mapping[str, Buffer]
    regions: Mapping[str, int]  # region -> bytes
    places: Mapping[str, tuple[str, int]]  # buffer -> region, offset

    def account(self) -> dict[str, int]:
        """Bytes by region, `scratch_unshared` (what scratch would take without sharing) and `total`."""
        scratch = [b for b in self.buffers.values() if b.role is Role.SCRATCH]
        return {
            **self.regions,
            "scratch_unshared": sum(aligned(b.bytes) for b in scratch),
            "total": sum(self.regions.values()),
        }

    def sharing(self, name: str) -> tuple[str, ...]:
        """The other buffers that have a byte in common with this one."""
        region, start = self.places[name]
        end = start + aligned(self.buffers[name].bytes)
        return tuple(
            other
            for other, (place, at) in self.places.items()
            if other != name and place == region and at < end and start < at + aligned(self.buffers[other].bytes)
        )


def lay_out(plans: Sequence[Plan]) -> Layout:
    """Places the buffers that all plans share. Raises PlanError for a plan whose values could not survive."""
    buffers = same_buffers(plans)
    for plan in plans:
        check_lifetimes(plan)
    owned = {name for plan in plans for name in _written_from_inputs(plan)}
    sizes = dict.fromkeys((role.value for role in Role), 0)
    places: dict[str, tuple[str, int]] = {}
    # small first, so that the small inputs of a decision are neighbours and travel in one copy
    for buffer in sorted(buffers.values(), key=lambda b: b.bytes):
        if buffer.role is Role.SCRATCH:
            continue
        region = buffer.role.value
        if buffer.role is Role.STATIC and buffer.name in owned:
            region = Role.STATE.value
        places[buffer.name] = (region, sizes[region])
        sizes[region] += aligned(buffer.bytes)
    offsets, sizes[Role.SCRATCH.value] = _pack_scratch(buffers, plans)
    for name, offset in offsets.items():
        places[name] = (Role.SCRATCH.value, offset)
    return Layout(buffers, sizes, places)


def check_lifetimes(plan: Plan) -> None:
    """Refuses a value that is read across decisions but lives in a role that does not survive them."""
    writer = {name: stage for stage in plan.stages for name in stage.writes}
    for stage in plan.stages:
        if stage.prepare and plan.clock(stage.name) != CLOCKS[0]:
            raise PlanError(
                f"stage '{stage.name}' is marked prepare but ticks on the {plan.clock(stage.name)} clock: "
                "a prepared stage may read no input; drop the mark or the read"
            )
        for name in stage.reads:
            if name in writer:
                _check_value(plan, stage.name, name, writer[name].name)
                if stage.prepare and not writer[name].prepare:
                    raise PlanError(
                        f"prepared stage '{stage.name}' reads '{name}', which '{writer[name].name}' writes later: "
                        f"mark '{writer[name].name}' prepare too"
                    )


def _check_value(plan: Plan, reader: str, name: str, writer: str) -> None:
    slow, fast = plan.clock(writer), plan.clock(reader)
    role = plan.buffers[name].role
    if role in (Role.SCRATCH, Role.OUTPUT) and CLOCKS.index(slow) < CLOCKS.index(fast):
        raise PlanError(
            f"stage '{reader}' ({fast} clock) reads '{name}', which '{writer}' writes on the slower {slow} clock, "
            f"but a {role.value} buffer does not survive a decision: give it the role state or static"
        )


def _written_from_inputs(plan: Plan) -> set[str]:
    reach = sources(plan)
    return {name for stage in plan.stages if reach[stage.name] for name in stage.writes}


def _spans(plan: Plan) -> dict[str, Span]:
    """Scratch whose writer and readers are always due together -> the stages, first to last, that need it."""
    reach = sources(plan)
    spans: dict[str, Span] = {}
    for at, stage in enumerate(plan.stages):
        for name in stage.writes:
            readers = [(i, s) for i, s in enumerate(plan.stages) if name in s.reads]
            together = all(reach[s.name] == reach[stage.name] and s.prepare == stage.prepare for _, s in readers)
            if plan.buffers[name].role is Role.SCRATCH and together:
                spans[name] = (at, max((i for i, _ in readers), default=at))
    return spans


def _pack_scratch(buffers: Mapping[str, Buffer], plans: Sequence[Plan]) -> tuple[dict[str, int], int]:
    """Largest first, each at the lowest offset free of every scratch buffer alive at the same time in any plan."""
    spans = [_spans(plan) for plan in plans]
    written = [{name for stage in plan.stages for name in stage.writes} for plan in plans]

    def conflict(a: str, b: str) -> bool:
        for span, names in zip(spans, written, strict=True):
            if (a in names and a not in span) or (b in names and b not in span):
                return True  # kept: a reader can be due while the writer is not
            if a in span and b in span and span[a][0] <= span[b][1] and span[b][0] <= span[a][1]:
                return True
        return not all(any(name in span for span in spans) for name in (a, b))

    offsets: dict[str, int] = {}
    scratch = [b for b in buffers.values() if b.role is Role.SCRATCH]
    for buffer in sorted(scratch, key=lambda b: -b.bytes):
        size, at = aligned(buffer.bytes), 0
        others = [name for name in offsets if conflict(buffer.name, name)]
        taken = sorted((offsets[name], offsets[name] + aligned(buffers[name].bytes)) for name in others)
        for low, high in taken:
            if at + size <= low:
                break
            at = max(at, high)
        offsets[buffer.name] = at
    return offsets, max((offsets[n] + aligned(buffers[n].bytes) for n in offsets), default=0)
