"""A policy of toy stages that can be slowed at will, and records made from it."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from innerloop.contract import Buffer, Chunk, Plan, Role, Stage
from innerloop.measure import record
from innerloop.measure.bench import PERCENTS
from innerloop.measure.clock import SEVEN, Facts, Prepared, Profiled, Workload
from innerloop.measure.control import ControlLoop, control_record
from innerloop.measure.cost import Cost, stage_costs
from innerloop.measure.message import Message
from innerloop.measure.observations import Scene, make_noises, make_observations
from innerloop.measure.record import Record

CHUNK, WIDTH, HIDDEN = 4, 3, 256
Tensors = Mapping[str, torch.Tensor]


def toy_plan(slow: Mapping[str, float]) -> Plan:
    """frames -> vision -> context (with tokens) -> action (with noise); `slow` maps a stage to seconds of sleep."""
    weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5

    def vision(t: Tensors) -> None:
        time.sleep(slow.get("vision", 0))
        t["image_tokens"].copy_(t["frames"].float().mean().expand(HIDDEN, HIDDEN) / 255 @ weight)

    def context(t: Tensors) -> None:
        time.sleep(slow.get("context", 0))
        t["kv"].copy_(t["image_tokens"] @ weight + t["tokens"].float().sum())

    def action(t: Tensors) -> None:
        time.sleep(slow.get("action", 0))
        t["actions"].copy_(t["noise"] + 1e-3 * (t["kv"] @ weight).mean())

    buffers = [
        Buffer("frames", (1, 2, 3072), torch.uint8, Role.INPUT),
        Buffer("tokens", (1, 8), torch.int32, Role.INPUT),
        Buffer("noise", (1, CHUNK, WIDTH), torch.float32, Role.INPUT),
        Buffer("image_tokens", (HIDDEN, HIDDEN), torch.float32, Role.STATE),
        Buffer("kv", (HIDDEN, HIDDEN), torch.float32, Role.STATE),
        Buffer("actions", (1, CHUNK, WIDTH), torch.float32, Role.OUTPUT),
    ]
    stages = (
        Stage("vision", vision, ("frames",), ("image_tokens",)),
        Stage("context", context, ("image_tokens", "tokens"), ("kv",)),
        Stage("action", action, ("kv", "noise"), ("actions",)),
    )
    ticks = {"frames": "observation", "tokens": "prompt", "noise": "step"}
    return Plan("toy", {b.name: b for b in buffers}, stages, ticks, "toy-fingerprint")


@dataclass
class ToySubject:
    """Satisfies measure.clock.Subject. `wrong` is added to what the interpreter answers."""

    slow: dict[str, float] = field(default_factory=dict)
    wrong: float = 0.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        plan = toy_plan(self.slow)
        self.plans = {8: plan}
        self.buffers = {b.name: torch.zeros(b.shape, dtype=b.dtype) for b in plan.buffers.values()}
        self.facts = Facts("toy", "random", "fp32", "fp32", "reference", 10**6, plan.fingerprint, 1, 2, CHUNK, 1)

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> Chunk:
        prepared = self.prepare(observation, noise)
        profiled = self.profile(prepared)
        return Chunk(self.finish(profiled, prepared), profiled.outputs["actions"])

    def prepare(self, observation: Mapping[str, Any], noise: np.ndarray) -> Prepared:
        time.sleep(self.slow.get("preprocess", 0))
        frames = np.stack([frame.reshape(-1) for frame in observation["images"].values()])[None]
        tokens = np.zeros((1, 8), np.int32)
        tokens[0, 0] = len(observation["prompt"])
        return Prepared({"frames": frames, "tokens": tokens, "noise": noise[None]}, 8, 1, None)

    def profile(self, prepared: Prepared) -> Profiled:
        start = time.perf_counter()
        for name, array in prepared.inputs.items():
            self.buffers[name].copy_(torch.from_numpy(np.array(array)))
        times, last = {}, time.perf_counter()
        transfer = last - start
        for stage in self.plans[8].stages:
            stage.run(self.buffers)
            now = time.perf_counter()
            times[stage.name], last = (now - last) * 1e3, now
        return Profiled({"actions": self.buffers["actions"][0].numpy().copy()}, transfer * 1e3, times)

    def finish(self, profiled: Profiled, prepared: Prepared) -> np.ndarray:
        time.sleep(self.slow.get("postprocess", 0))
        return profiled.outputs["actions"] * 2

    def infer_in_parts(self, observation: Mapping[str, Any], noise: np.ndarray) -> Profiled:
        started = time.perf_counter()
        prepared = self.prepare(observation, noise)
        ready = time.perf_counter()
        profiled = self.profile(prepared)
        self.finish(profiled, prepared)
        return replace(profiled, preprocess_ms=1e3 * (ready - started))

    def interpret(self, prepared: Prepared) -> np.ndarray:
        return self.profile(prepared).outputs["actions"] + np.float32(self.wrong)

    def costs(self, prepared: Prepared) -> dict[str, Cost]:
        return stage_costs(self.plans[8], prepared.inputs, self.device)

    def launches(self, prepared: Prepared) -> dict[str, int]:
        return {name: cost.operations for name, cost in self.costs(prepared).items()}


def toy_workload(count: int = 3) -> Workload:
    """So many observations."""
    scene = Scene(("base", "wrist"), (32, 32), 4)
    return Workload(make_observations(scene, "open", count), make_noises(CHUNK, WIDTH, count), Message("raw"))


def make_records() -> dict[str, Record]:
    """One record of every kind, with made-up figures."""
    origin: dict[str, Any] = {
        "policy": "toy",
        "weights": "random",
        "device": "Imaginary GPU",
        "dtype": "bf16",
        "precision": "bf16",
        "fingerprint": "f00",
        "inputs": "abc",
        "command": "innerloop bench toy",
        "commit": "0123456789abcdef+dirty",
        "time": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.11"},
        "clocks": {"sm_mhz": 1980.0, "power_w": 400.0},
    }
    sizes: dict[str, Any] = {"views": 2, "prompt_tokens": 48, "chunk": 10, "steps": 10}
    rung = record.Rung(
        name="eager", p50_ms=65.0, p99_ms=70.0, launches=13413, saved_ms=0.0, share=0.0, cosine=1.0, max_abs=0.0
    )
    fused = dataclasses.replace(rung, name="fused", p50_ms=12.0, p99_ms=12.2, launches=900, saved_ms=53.0, share=1.0)
    stages = {"vision": 1.5, "context": 4.0, "action": 5.0}
    rows = [
        record.BatchRow(
            batch=batch,
            p50_ms=8 + 4.0 * batch,
            p99_ms=9 + 4.0 * batch,
            per_sample_ms=4 + 8 / batch,
            decisions_per_s=1e3 / (4 + 8 / batch),
            stages={name: ms * (0.3 + 0.7 * batch) for name, ms in stages.items()},
        )
        for batch in (1, 2, 4, 8, 16)
    ]
    loop = ControlLoop(chunk=50, horizon=16, control_hz=50, environment_ms=5, delay_ms=4, latency_ms=12)
    made: list[Record] = [
        record.LatencyRecord(**origin, **sizes, **latency_figures()),
        record.LadderRecord(**origin, **sizes, batch=1, ticks=500, rungs=[rung, fused]),
        record.BatchRecord(**origin, **sizes, ticks=500, rows=rows),
        control_record(loop, origin),
        record.RefreshRecord(
            **origin,
            ticks=500,
            rows=[record.RefreshRow(changed=["noise"], refreshed=["action"], p50_ms=5.0, p99_ms=5.1)],
        ),
        record.CapsulesRecord(
            **origin, bytes=10**7, ticks=500, snapshot_ms={"gpu": 0.1}, restore_ms={"gpu": 0.1}, identical=True
        ),
        record.KernelsRecord(
            **origin,
            **sizes,
            span_us={"vision": 40.0, "action": 90.0},
            rows=[
                record.KernelRow(stage="vision", kernel="_attend 4x16", launches=27, us=31.0),
                record.KernelRow(stage="action", kernel="linear 128", launches=36, us=80.5),
                record.KernelRow(stage="action", kernel="tiny 1", launches=1, us=0.5),
            ],
        ),
        record.OperatorsRecord(
            **{name: origin[name] for name in ("device", "command", "commit", "time", "versions", "clocks")},
            ceilings={"copy_gb_s": 4300.0},
            rows=[
                record.OperatorRow(
                    operator="norm",
                    shape="712x2048",
                    us=4.0,
                    against_us={"torch": 21.0},
                    flops=0,
                    bytes=5_800_000,
                    roof_percent=34.0,
                    bound="bandwidth",
                    max_abs=1e-3,
                )
            ],
        ),
        record.ServedRecord(
            **{name: value for name, value in origin.items() if name not in ("weights", "dtype")},
            frames="224x224 raw",
            ticks=500,
            rows=[
                record.ServedRow(
                    clients=clients,
                    p50_ms=13.0 * clients,
                    p95_ms=13.5 * clients,
                    p99_ms=14.0 * clients,
                    max_ms=20.0 * clients,
                    queue_ms=12.0 * (clients - 1),
                    server_ms=12.5 * clients,
                    transport_ms=0.5,
                    decisions_per_s=77.0,
                )
                for clients in (1, 4)
            ],
        ),
        record.SuccessRecord(
            **origin,
            task="reach",
            environment="planar 1",
            episodes=100,
            successes=97,
            success=0.97,
            interval_low=0.915,
            interval_high=0.99,
            seeds=[0, 1],
            chunk=10,
            horizon=5,
            steps=10,
            environments=1,
            engine="innerloop",
            kernels="reference",
            mode="realtime",
            rate_hz=40.0,
            delay_ms=100.0,
            jitter_ms=0.0,
            outcomes={"reach": [True, False]},
            seam=1.2,
            waited=0.01,
        ),
    ]
    return {one.kind: one for one in made}


def latency_figures() -> dict[str, Any]:
    """The figures of a plausible decision of 12 ms."""
    stages = dict(zip(SEVEN, (0.2, 0.4, 0.1, 1.5, 4.2, 5.2, 0.1), strict=True))
    host = dict.fromkeys(SEVEN, 0)
    bounds = dict(zip(SEVEN, ("host", "host", "bandwidth", "compute", "compute", "bandwidth", "host"), strict=True))
    whole = sum(stages.values())
    return {
        "kernels": "fused",
        "memory_bytes": 7_500_000_000,
        "batch": 1,
        "frames": "640x480 jpeg",
        "prompt_capacity": 64,
        "p50_ms": whole,
        "p95_ms": whole * 1.01,
        "p99_ms": whole * 1.02,
        "max_ms": whole * 1.1,
        "jitter_ms": whole * 0.02,
        "quantiles_ms": {f"{p:g}": whole * (0.99 + p / 5000) for p in PERCENTS},
        "ticks": 1000,
        "warmup": 150,
        "settled": True,
        "launches": 900,
        "stages": stages,
        **{f"stages_{name}_ms": {stage: ms * 1.05 for stage, ms in stages.items()} for name in ("p95", "p99", "max")},
        "stages_jitter_ms": {stage: ms * 0.05 for stage, ms in stages.items()},
        "stages_launches": host | {"vision": 190, "context": 140, "action": 570},
        "stages_flops": host | {"vision": 44 * 10**10, "context": 26 * 10**11, "action": 27 * 10**10},
        "stages_bytes": host | {"transfer": 10**6, "vision": 83 * 10**7, "context": 39 * 10**8, "action": 62 * 10**8},
        "stages_floor_ms": dict.fromkeys(SEVEN, 0.0) | {"vision": 0.6, "context": 3.5, "action": 1.5, "transfer": 0.05},
        "stages_roof_percent": dict.fromkeys(SEVEN, 0.0)
        | {"vision": 40.0, "context": 83.0, "action": 29.0, "transfer": 50.0},
        "stages_bound": bounds,
        "host_ms": 0.8,
        "device_ms": 10.9,
        "unattributed_ms": 0.0,
        "ceilings": {"copy_gb_s": 4300.0, "matrix_bf16_tflops": 750.0, "matrix_fp8_tflops": 1320.0, "launch_us": 1.2},
        "agreement": {
            "interpreter": {"cosine": 1.0, "max_abs": 0.0},
            "lerobot": {"cosine": 0.9999, "max_abs": 0.01, "global_cosine": 0.99995},
        },
        "against": {"lerobot": 295.6},
    }
