"""One flat JSON object per set of figures. A missing, extra or mistyped field is an error."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from innerloop.measure.schema import RecordError, build

USUAL_FRAMES = "224x224 raw"  # what a title need not say


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every kind of record says about where its figures come from. Subclasses add the figures.

    commit: ends in "+dirty" when the working tree differed. clocks: MHz, watts and degrees as found under the
    same load, right after the run. time: UTC, ISO 8601.
    """

    device: str
    command: str
    commit: str
    time: str
    versions: dict[str, str]
    clocks: dict[str, float]

    @property
    def kind(self) -> str:
        """The name of the record's schema."""
        return _kind(type(self))

    def to_json(self) -> dict[str, Any]:
        """Plain data, checked."""
        data = {"kind": self.kind, **dataclasses.asdict(self)}
        parse(data)
        return data

    def save(self, path: Path) -> None:
        """Write indented JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class PolicyRecord(Record):
    """A record of one policy. weights: "random" or a digest. inputs: a digest of observations and noise."""

    policy: str
    weights: str
    dtype: str
    precision: str
    fingerprint: str
    inputs: str


@dataclass(frozen=True, kw_only=True)
class LatencyRecord(PolicyRecord):
    """One policy's whole call, in milliseconds. `stages` maps the seven stages to their p50.

    kernels: what really ran. memory_bytes: on the device, planned. quantiles_ms: percent -> milliseconds.
    unattributed_ms: p50 of the call minus the sum of the stages' p50.
    agreement: name -> cosine and max_abs of the worst of up to 20 decisions' normalised actions, the largest action, global_cosine
    of all of them. against: name -> p50 of another implementation.
    """

    kernels: str
    memory_bytes: int
    batch: int
    views: int
    frames: str
    prompt_tokens: int
    prompt_capacity: int
    chunk: int
    steps: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    jitter_ms: float
    quantiles_ms: dict[str, float]
    ticks: int
    warmup: int
    settled: bool
    launches: int
    stages: dict[str, float]
    stages_p95_ms: dict[str, float]
    stages_p99_ms: dict[str, float]
    stages_max_ms: dict[str, float]
    stages_jitter_ms: dict[str, float]
    stages_launches: dict[str, int]
    stages_flops: dict[str, int]
    stages_bytes: dict[str, int]
    stages_floor_ms: dict[str, float]
    stages_roof_percent: dict[str, float]
    stages_bound: dict[str, str]
    host_ms: float
    device_ms: float
    unattributed_ms: float
    ceilings: dict[str, float]
    agreement: dict[str, dict[str, float]]
    against: dict[str, float]

    @property
    def host_share(self) -> float:
        """What of the whole call's p50 is not the device's stages: the host's work and hand-overs that nothing hides."""
        return max(0.0, 1.0 - self.device_ms / self.p50_ms)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of an optimisation ladder. Agreement is with the ladder's first rung, on normalised actions."""

    name: str
    p50_ms: float
    p99_ms: float
    launches: int
    saved_ms: float
    share: float
    cosine: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class LadderRecord(PolicyRecord):
    """The same decisions through ever more of the machinery. `share` of a rung is its part of the whole saving."""

    batch: int
    views: int
    prompt_tokens: int
    chunk: int
    steps: int
    ticks: int
    rungs: list[Rung]


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One batch size: milliseconds a call and a sample, decisions a second, p50 of each device stage."""

    batch: int
    p50_ms: float
    p99_ms: float
    per_sample_ms: float
    decisions_per_s: float
    stages: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BatchRecord(PolicyRecord):
    """Latency and throughput as the batch grows."""

    views: int
    prompt_tokens: int
    chunk: int
    steps: int
    ticks: int
    rows: list[BatchRow]


@dataclass(frozen=True, kw_only=True)
class ControlRow:
    """Attained action rates at one network delay and executed horizon."""

    delay_ms: float
    horizon: int
    synchronous_hz: float
    overlapped_hz: float
    oldest_observation_ms: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class ControlRecord(PolicyRecord):
    """Whether the policy or the robot is the limit. flip_ms: the latency at which that changes."""

    chunk: int
    horizon: int
    control_hz: float
    environment_ms: float
    delay_ms: float
    latency_ms: float
    synchronous_hz: float
    overlapped_hz: float
    bound: str
    flip_ms: float
    rows: list[ControlRow]


@dataclass(frozen=True, kw_only=True)
class RefreshRow:
    """What a decision costs when only `changed` inputs are new."""

    changed: list[str]
    refreshed: list[str]
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True)
class RefreshRecord(PolicyRecord):
    """Latency by what changed since the last decision."""

    ticks: int
    rows: list[RefreshRow]


@dataclass(frozen=True, kw_only=True)
class CapsulesRecord(PolicyRecord):
    """Saving and restoring one session's state, p50 milliseconds, by where the capsule lives."""

    bytes: int
    ticks: int
    snapshot_ms: dict[str, float]
    restore_ms: dict[str, float]
    identical: bool


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator at one shape: p50 microseconds here and of each alternative, and the share of its roof."""

    operator: str
    shape: str
    us: float
    against_us: dict[str, float]
    flops: int
    bytes: int
    roof_percent: float
    bound: str
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class OperatorsRecord(Record):
    """Operators at the shapes that policies give them."""

    ceilings: dict[str, float]
    rows: list[OperatorRow]


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One kernel in one stage. us: device microseconds of a decision, all its launches together.

    A kernel that starts before its predecessor has ended (dependent launch) counts the wait for it too.
    """

    stage: str
    kernel: str
    launches: int
    us: float


@dataclass(frozen=True, kw_only=True)
class KernelsRecord(PolicyRecord):
    """Where the device's time goes. span_us: stage -> from its first kernel's start to its last one's end."""

    views: int
    prompt_tokens: int
    chunk: int
    steps: int
    span_us: dict[str, float]
    rows: list[KernelRow]


@dataclass(frozen=True, kw_only=True)
class SuccessRecord(PolicyRecord):
    """Closed-loop success with its 95 % interval, and everything it depends on.

    engine: innerloop, or the other implementation that decided. mode: of execution; horizon: actions from one
    observation to the next. delay_ms, jitter_ms: injected into every answer. outcomes: task -> success by seed.
    seam: median over episodes (innerloop.execute); -1 where no chunk joined another. waited: share of control ticks
    without an action.
    """

    engine: str
    kernels: str
    task: str
    environment: str
    episodes: int
    successes: int
    success: float
    interval_low: float
    interval_high: float
    seeds: list[int]
    chunk: int
    horizon: int
    steps: int
    environments: int
    mode: str
    rate_hz: float
    delay_ms: float
    jitter_ms: float
    outcomes: dict[str, list[bool]]
    seam: float
    waited: float


@dataclass(frozen=True, kw_only=True)
class ServedRow:
    """So many clients in closed loops: milliseconds at the client, p50 of the server's queue, of all its work, and of
    the rest, which is the wire."""

    clients: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    queue_ms: float
    server_ms: float
    transport_ms: float
    decisions_per_s: float


@dataclass(frozen=True, kw_only=True)
class ServedRecord(Record):
    """A served policy, measured at its clients. device: what the server says it runs on."""

    policy: str
    precision: str
    fingerprint: str
    inputs: str
    frames: str
    ticks: int
    rows: list[ServedRow]


def _kind(schema: type[Record]) -> str:
    return schema.__name__.removesuffix("Record").lower()


SCHEMAS: dict[str, type[Record]] = {
    _kind(schema): schema for schema in (*PolicyRecord.__subclasses__(), OperatorsRecord, ServedRecord)
}


def parse(data: dict[str, Any]) -> Record:
    """A record from plain data. Raises RecordError naming the field that is missing, unknown or of a wrong type."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in SCHEMAS:
        raise RecordError(f"record kind is {kind!r}; set `kind` to one of {', '.join(sorted(SCHEMAS))}")
    fields = {name: value for name, value in data.items() if name != "kind"}
    record = build(SCHEMAS[kind], fields, kind)
    assert isinstance(record, Record)
    return record


def load(path: Path) -> Record:
    """Read and check one record file. Raises RecordError."""
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} cannot be read as a record: {error}; pass a JSON file written by bench") from error
    if not isinstance(data, dict):
        raise RecordError(f"{path} holds a {type(data).__name__}; a record is one JSON object")
    try:
        return parse(data)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
