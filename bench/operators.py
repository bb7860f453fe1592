"""`python -m bench.operators [--launches] [--json FILE] [OP ...]`: every Triton op checked against fp32 and timed.

Beside torch eager and torch.compile of the same meaning; one table at the end. --launches also tries every candidate
launch and prints each as it is measured.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.case import Case, Inputs
from bench.cases import cases
from innerloop.kernels import launch
from innerloop.kernels.launch import Launch


def main() -> None:
    """Checks and times; exits with 1 where an op is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--launches", action="store_true", help="try others than the preferred launch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    roof = harness.measure_roof(device)
    print(f"{torch.cuda.get_device_name()}: {roof.copy / 1e12:.2f} TB/s, {roof.matrix / 1e12:.0f} TFLOP/s", flush=True)
    lines, rows, wrong = [], [], 0
    for case in cases(*options.ops):
        begun = time.perf_counter()
        error, text = _checked(case, device)
        wrong += error is None
        inputs = harness.rotated(case, device)
        best, record = _timed(case, roof, inputs, options.launches)
        rows.append({**record, "error": math.inf if error is None else error})
        lines.append(f"{harness.line(record)}  {text}  {best}")
        print(f"   {case.op} {case.label}: {time.perf_counter() - begun:.1f} s", flush=True)
    print("\n".join(lines))
    if options.json and not wrong:
        harness.write(options.json, rows, roof)
    raise SystemExit(1 if wrong else 0)


def _checked(case: Case, device: torch.device) -> tuple[float | None, str]:
    try:
        error, allowed = case.check(device)
    except AssertionError as reason:
        return None, f"WRONG: {reason}"
    return error, f"err {error:.1e}/{allowed:.1e}"


def _timed(case: Case, roof: harness.Roof, inputs: list[Inputs], launches: bool) -> tuple[str, dict[str, Any]]:
    module = case.triton()
    times: dict[str, float] = {"preferred": harness.time_case(case, module, inputs)}
    device = torch.device("cuda", torch.cuda.current_device())
    for key, choices in harness.launches_of(lambda: case.call(module, inputs[0]), device).items():
        for choice in choices[1:] if launches else ():
            with launch.forced({key: choice}):
                times[f"{key[0]} {short(choice)}"] = harness.time_case(case, module, inputs)
    for label, us in times.items():
        print(f"{case.op:<11}{case.label:<34}{us:>8.2f} us  {label}")
    best = min(times, key=lambda label: times[label])
    eager = harness.time_case(case, case.reference(), inputs)
    others = {"eager": eager, "compiled": harness.time_compiled(case, inputs)}
    record = harness.row(case, roof, times["preferred"], others)
    note = "" if best == "preferred" else f"{times[best]:.2f} with {best}"
    return note, record


def short(choice: Launch) -> str:
    """Warps, stages and sizes in a few words."""
    sizes = " ".join(f"{name}={size}" for name, size in choice.sizes)
    return f"{choice.warps} warps {choice.stages} stages {sizes}"


if __name__ == "__main__":
    main()
