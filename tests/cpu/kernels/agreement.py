"""Triton against the reference at the same dtype and in fp32."""

import importlib
from typing import Any

import torch
from torch import Tensor

from bench.case import earned

# The interpreter truncates fp32 to bf16 where the GPU rounds: up to one unit in the last place more, each time.
SLACK = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7}


def agree(op: str, function: str, *arguments: Any, written: tuple[int, ...] = (), roundings: int = 1) -> None:
    """Calls `function` of an op's Triton module and of its reference; compares every result and written argument.

    roundings: how many, one after another, lead to a result.
    """
    ours, same, truth = (
        _outputs(op, module, function, arguments, written, widen)
        for module, widen in (("triton", False), ("reference", False), ("reference", True))
    )
    for n, (a, b, c) in enumerate(zip(ours, same, truth, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        earned(f"{op}.{function} result {n}", a, b, c, roundings * SLACK[a.dtype])


def _outputs(
    op: str, module: str, function: str, arguments: tuple[Any, ...], written: tuple[int, ...], widen: bool
) -> list[Tensor]:
    own = [_own(a, n in written, widen) for n, a in enumerate(arguments)]
    result = getattr(importlib.import_module(f"innerloop.kernels.{op}.{module}"), function)(*own)
    results = list(result) if isinstance(result, tuple) else [result]
    return [*results, *(own[n] for n in written)]


def _own(value: Any, written: bool, widen: bool) -> Any:
    if isinstance(value, list):
        return [_own(part, written, widen) for part in value]
    if not isinstance(value, Tensor):
        return value
    value = value.clone() if written else value
    return value.float() if widen and value.dtype is torch.bfloat16 else value
