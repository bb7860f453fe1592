"""Products of few rows as the diffusion transformer and the action expert run them: in a row of dependent launches."""

from typing import Any

import torch

from bench.case import Case, Inputs, Pair
from bench.cases import cases
from innerloop.kernels import launch
from innerloop.kernels.attention import cost as attention_cost
from innerloop.kernels.linear import cost


class Chained(Case):
    """A call that may start before the one ahead of it ends."""

    def call(self, module: Any, inputs: Inputs) -> Any:
        """Ours within a row of its own kind; the reference has no kernels to overlap, and is compiled as one graph."""
        if not getattr(module, "__name__", "").endswith("triton"):
            return super().call(module, inputs)
        with launch.dependent_launch():
            return super().call(module, inputs)


class ChainedPair(Chained, Pair):
    """A product whose shares the following norm adds, both so."""


def chained() -> list[Case]:
    """Those of bench.cases that stand in such a row."""
    found = [case for case in cases("linear") if case.label.startswith("dit")]
    return [
        *(
            (ChainedPair if isinstance(c, Pair) else Chained)(c.op, c.function, f"{c.label}, chained", c.cost, c.make)
            for c in found
        ),
        *expert(50, 576),
    ]


def expert(tokens: int, start: int) -> list[Case]:
    """Kernels of a layer of the action expert over dense weights; its products in shares are `out` and `down`."""
    width, mlp, heads, dim, keys = 1024, 4096, 8, 256, start + tokens

    def weight(d: torch.device, columns: int, inner: int) -> torch.Tensor:
        return (torch.randn(columns, inner, device=d) * inner**-0.5).bfloat16()

    def rows(d: torch.device, *shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, device=d).bfloat16()

    def rotated(d: torch.device) -> Inputs:
        angle = torch.rand(1, tokens, dim // 2, device=d) * 6.0
        caches = (torch.zeros(1, keys, 1, dim, dtype=torch.bfloat16, device=d) for _ in range(2))
        return rows(d, tokens, width), weight(d, 2560, width), angle.cos(), angle.sin(), heads, 1, *caches, start

    def gated(d: torch.device) -> Inputs:
        return rows(d, tokens, width), weight(d, 2 * mlp, width), "gelu_tanh"

    def continued(d: torch.device) -> Inputs:
        mask = torch.ones(1, keys, dtype=torch.int32, device=d)
        cache = (rows(d, keys, 1, dim) for _ in range(2))
        return rows(d, tokens, heads, dim), *cache, mask, dim**-0.5, start

    def shares(inner: int, label: str) -> Case:
        def make(d: torch.device) -> Inputs:
            return (rows(d, tokens, inner), weight(d, width, inner), None, rows(d, tokens, width), rows(d, width)[0])

        return ChainedPair("linear", "deferred", label, cost.linear(tokens, width, inner), make)

    size = f"expert {tokens} rows"
    return [
        Chained(
            "linear", "rotated", f"{size} qkv, rotated", cost.rotated(tokens, heads, 1, dim, width), rotated, (6, 7)
        ),
        Chained(
            "attention",
            "continued",
            f"{size} of {keys}",
            attention_cost.attention(tokens, keys, heads, 1, dim),
            continued,
        ),
        shares(heads * dim, f"{size} out, add rms"),
        Chained("linear", "gated", f"{size} gate-up, unit", cost.gated(tokens, mlp, width), gated),
        shares(mlp, f"{size} down, add rms"),
    ]
