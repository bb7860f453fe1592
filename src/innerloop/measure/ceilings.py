"""What this machine can do at best, measured beside whatever is compared with it."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

REPEATS = 10
CHAIN = 200  # dependent tiny kernels in the launch measurement
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_TRANSFER_BYTES = 64 << 20
_MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
_DTYPES = {
    "cuda": {"bf16": torch.bfloat16, "fp32": torch.float32},
    "cpu": {"bf16": torch.bfloat16, "fp32": torch.float32},
}
_FP8_CAPABILITY = (8, 9)  # Ada and later have e4m3 tensor cores


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device.

    copy: bytes read plus written a second. transfer: host to device, pinned memory, bytes a second.
    matrix: flop/s of a square product by dtype. launch_s: one dependent tiny kernel in a captured graph.
    eager_s: one tiny operator started from Python. On a CPU transfer equals copy and launch_s equals eager_s.
    """

    copy: float
    transfer: float
    matrix: dict[str, float]
    launch_s: float
    eager_s: float

    def flat(self) -> dict[str, float]:
        """The same under names with units, for records."""
        figures = {
            "copy_gb_s": self.copy / 1e9,
            "transfer_gb_s": self.transfer / 1e9,
            "launch_us": self.launch_s * 1e6,
            "eager_us": self.eager_s * 1e6,
        }
        return figures | {f"matrix_{name}_tflops": rate / 1e12 for name, rate in self.matrix.items()}


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy, transfer, matrix and launch rates of a device: a few seconds, the best of ten tries each."""
    eager = _eager_launch(device)
    copy = _copy_rate(device)
    on_gpu = device.type == "cuda"
    found = Ceilings(
        copy=copy,
        transfer=_transfer_rate(device) if on_gpu else copy,
        matrix=_matrix_rates(device),
        launch_s=_graph_launch(device) if on_gpu else eager,
        eager_s=eager,
    )
    if on_gpu:
        torch.cuda.empty_cache()  # the copies were large
    return found


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The fastest of several runs, by CUDA events on a GPU and by the wall clock elsewhere."""
    run()
    if device.type != "cuda":
        return min(_wall(run) for _ in range(repeats))
    torch.cuda.synchronize(device)
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1e3)
    return min(seconds)


def _copy_rate(device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def _transfer_rate(device: torch.device) -> float:
    source = torch.ones(_TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
    return _TRANSFER_BYTES / best_seconds(lambda: target.copy_(source, non_blocking=True), device)


def _matrix_rates(device: torch.device) -> dict[str, float]:
    size = _MATRIX_SIZE[device.type]
    repeats = REPEATS if device.type == "cuda" else 3
    flops = 2 * size**3
    rates = {}
    for name, dtype in _DTYPES[device.type].items():
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype).t()
        out = torch.empty(size, size, device=device, dtype=dtype)
        rates[name] = flops / best_seconds(functools.partial(torch.mm, left, right, out=out), device, repeats)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        rates["fp8"] = flops / _fp8_seconds(size, device)
    return rates


def _fp8_seconds(size: int, device: torch.device) -> float:
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    return best_seconds(
        lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True), device
    )


def _graph_launch(device: torch.device) -> float:
    value = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        value.add_(1.0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CHAIN):
            value.add_(1.0)
    return best_seconds(graph.replay, device) / CHAIN


def _eager_launch(device: torch.device) -> float:
    value = torch.zeros(1, device=device)

    def chain() -> None:
        for _ in range(CHAIN):
            value.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    chain()
    return float(np.median([_wall(chain) for _ in range(REPEATS)])) / CHAIN


def _wall(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
