"""The diffusion transformer's products of few rows as they run there: in a row of dependent launches."""

from typing import Any

from bench.cases import Case, Inputs, Pair, cases
from innerloop.kernels import launch


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
        (ChainedPair if isinstance(c, Pair) else Chained)(c.op, c.function, f"{c.label}, chained", c.cost, c.make)
        for c in found
    ]
