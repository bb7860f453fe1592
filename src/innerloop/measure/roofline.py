"""Which resource bounds a stage, and how much of that resource's roof it attains."""

from dataclasses import dataclass

import torch

from innerloop.measure.ceilings import Ceilings
from innerloop.measure.cost import Cost


@dataclass(frozen=True)
class Roof:
    """bound: compute, bandwidth, launch or host. floor_ms: the least time; percent: floor over measured, 0 to 100."""

    bound: str
    floor_ms: float
    percent: float


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache of a GPU; 0 where it cannot be asked."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def device_roof(cost: Cost, launches: int, measured_ms: float, ceilings: Ceilings, rate: str, cache: int = 0) -> Roof:
    """Roof of a device stage.

    The floor is the longer of its flops at the matrix rate of dtype `rate` and its bytes at the copy rate (each
    memory once when all of it fits the cache). Where its launches alone take longer than both, they are the bound.
    """
    moved = cost.unique_bytes if cost.unique_bytes <= cache else cost.bytes
    times = {"compute": cost.flops / ceilings.matrix[rate], "bandwidth": moved / ceilings.copy}
    floor_ms = max(times.values()) * 1e3
    times["launch"] = launches * ceilings.launch_s
    return Roof(max(times, key=lambda name: times[name]), floor_ms, _percent(floor_ms, measured_ms))


def transfer_roof(size: int, measured_ms: float, ceilings: Ceilings) -> Roof:
    """Roof of a host-to-device copy of `size` bytes; bound by the host when the wire needs less than half the time."""
    floor_ms = size / ceilings.transfer * 1e3
    return Roof("bandwidth" if 2 * floor_ms >= measured_ms else "host", floor_ms, _percent(floor_ms, measured_ms))


def host_roof() -> Roof:
    """Roof of work on the host, for which no floor is claimed."""
    return Roof("host", 0.0, 0.0)


def _percent(floor_ms: float, measured_ms: float) -> float:
    return 100 * floor_ms / measured_ms if measured_ms > 0 else 0.0
