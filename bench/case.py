"""One op at one shape: inputs, call, cost, and the check against fp32 truth."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.cost import Cost
from innerloop.kernels.norm import reference as norm_reference
from innerloop.kernels.rope import reference as rope_reference

Inputs = tuple[Any, ...]
BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class Case:
    """One op at one shape. written: positions of arguments that the op writes."""

    op: str
    function: str
    label: str
    cost: Cost
    make: Callable[[torch.device], Inputs]
    written: tuple[int, ...] = ()

    def reference(self) -> Any:
        """The op's plain-torch module."""
        return importlib.import_module(f"innerloop.kernels.{self.op}.reference")

    def triton(self) -> Any:
        """The op's Triton module."""
        return importlib.import_module(f"innerloop.kernels.{self.op}.triton")

    def call(self, module: Any, inputs: Inputs) -> Any:
        """Runs the op from a module."""
        return getattr(module, self.function)(*inputs)

    def check(self, device: torch.device) -> tuple[float, float]:
        """(error, allowed): raises where Triton errs more than twice the same-dtype torch code against fp32."""
        torch.manual_seed(0)
        inputs = self.make(device)
        truth = self.outputs(self.reference(), tuple(_widened(i) for i in inputs))
        same = self.outputs(self.reference(), inputs)
        ours = self.outputs(self.triton(), inputs)
        return max(
            (earned(f"{self.op} {self.label}", *three) for three in zip(ours, same, truth, strict=True)),
            key=lambda e: e[0] / e[1],
        )

    def outputs(self, module: Any, inputs: Inputs) -> list[Tensor]:
        """Results and written arguments of one call; the arguments themselves stay as they were."""
        own = tuple(i.clone() if n in self.written else i for n, i in enumerate(inputs))
        result = self.call(module, own)
        results = list(result) if isinstance(result, tuple) else [result]
        return [*results, *(own[n] for n in self.written)]


class Pair(Case):
    """A product whose shares and bias the following norm adds: x, weight, bias, residual, and the norm's weight."""

    def call(self, module: Any, inputs: Inputs) -> Any:
        """Both ops, from the modules of the same kind."""
        ours = getattr(module, "__name__", "").endswith("triton")
        norm = importlib.import_module("innerloop.kernels.norm.triton") if ours else norm_reference
        x, weight, bias, residual, scale = inputs
        delta, left = getattr(module, self.function)(x, weight, bias)
        return norm.add_rms_norm(residual, delta, scale, 1e-6, False, left)


class Composed(Case):
    """Rotary attention as two ops: K and V rotated and stored, then read."""

    def call(self, module: Any, inputs: Inputs) -> Any:
        """Both ops, from the modules of the same kind."""
        ours = getattr(module, "__name__", "").endswith("triton")
        rope = importlib.import_module("innerloop.kernels.rope.triton") if ours else rope_reference
        qkv, cos, sin, heads, valid, scale = inputs
        k, v = (qkv.new_empty(*qkv.shape[:2], heads, qkv.shape[2] // (3 * heads)) for _ in range(2))
        q = rope.rotate_and_store(qkv, cos, sin, heads, heads, k, v, 0)
        return getattr(module, self.function)(q, k, v, valid, scale)


def earned(label: str, ours: Tensor, same: Tensor, truth: Tensor, slack: float = 4e-6) -> tuple[float, float]:
    """Largest error of ours, and what is allowed: twice the same-dtype error and `slack` of the largest value."""
    if truth.numel() == 0:
        return 0.0, slack
    scale = max(1.0, float(truth.abs().max()))
    error = float((ours.double() - truth.double()).abs().max())
    allowed = 2.0 * float((same.double() - truth.double()).abs().max()) + slack * scale
    if not error <= allowed:
        raise AssertionError(f"{label}: error {error:.3g} exceeds the {allowed:.3g} that torch earns")
    return error, allowed


def _widened(value: Any) -> Any:
    if value is BF16:
        return FP32
    return value.float() if isinstance(value, Tensor) and value.dtype is BF16 else value


def random(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, device=device).to(dtype)
