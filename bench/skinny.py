"""`python -m bench.skinny [--tokens 10] [--prefix 576] [--json FILE]`: the few-row kernels of an action expert.

Each op 180 times in a row on the weights of 18 layers (also the query and attention of a cross block, 16 heads over 182
keys), then a whole solver: 18 layers, 10 Euler steps. Plain launches beside a chain of dependent ones, and a chain that
reads how many rows are given. Every op is first checked against fp32.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.case import Case
from innerloop.kernels.cost import Cost
from innerloop.kernels.euler import Guide
from innerloop.kernels.skinny import Packed, chain, cost, cross, cuda, pack, reference

CROSS_HEADS, CROSS_DIM, CROSS_KEYS, CROSS_ROOM = 16, 64, 182, 320  # starVLA's QwenPI_v3
LAYERS, STEPS, WIDTH, HEADS, DIM, MLP, ACTIONS, EPS = 18, 10, 1024, 8, 256, 4096, 32, 1e-6


class Stack:
    """18 layers with distinct weights and K/V; inputs of `tokens` rows. given: a length that kernels read, if any."""

    def __init__(self, tokens: int, prefix: int) -> None:
        torch.manual_seed(0)
        self.tokens, self.start = tokens, prefix
        self.qkv = [pack(_weight((HEADS + 2) * DIM, WIDTH), DIM // 2) for _ in range(LAYERS)]
        self.out = [pack(_weight(WIDTH, HEADS * DIM)) for _ in range(LAYERS)]
        self.gate_up = [pack(_weight(2 * MLP, WIDTH), MLP) for _ in range(LAYERS)]
        self.down = [pack(_weight(WIDTH, MLP)) for _ in range(LAYERS)]
        self.k, self.v = (_random(LAYERS, 1, prefix + tokens, 1, DIM).bfloat16() for _ in range(2))
        self.valid = torch.ones(1, prefix + tokens, dtype=torch.int32, device="cuda")
        self.tables = _random(2, 2 * LAYERS + 1, 3, WIDTH) * 0.2
        self.given: torch.Tensor | None = None
        self.query = [pack(_weight(CROSS_HEADS * CROSS_DIM, WIDTH)) for _ in range(LAYERS)]
        self.query_bias = _random(CROSS_HEADS * CROSS_DIM).bfloat16()
        self.query_table = (1.0 + self.tables[0, 0, 0], self.tables[0, 0, 1])
        self.memory = _random(LAYERS, 1, CROSS_ROOM, 2, CROSS_HEADS, CROSS_DIM).bfloat16()
        self.remembered = (torch.arange(CROSS_ROOM, device="cuda") < CROSS_KEYS).int()[None]
        angle = _random(1, tokens, DIM // 2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.action_in, self.action_out = _random(WIDTH, ACTIONS) / 8, _random(ACTIONS, WIDTH) / 8
        self.bias_in, self.bias_out = _random(WIDTH), _random(ACTIONS)
        self.noise, self.previous = _random(2, 1, tokens, ACTIONS)
        self.x, self.y, self.h = (_random(1, tokens, n).bfloat16() for n in (WIDTH, HEADS * DIM, MLP))
        self.q = _random(1, tokens, HEADS, DIM).bfloat16()

    def arguments(self, op: str, i: int, **inputs: torch.Tensor) -> tuple[Any, ...]:
        """What layer i gives an op, in the order of its parameters."""
        if op == "cross":
            return self.cross(i)
        get = {"x": self.x, "y": self.y, "h": self.h, "q": self.q, **inputs}
        tables = self.tables[0] if self.given is None else self.tables.movedim(0, 2)
        (scale, shift, gate), (mlp_scale, mlp_shift, mlp_gate) = tables[2 * i : 2 * i + 2]
        keys = (self.k[i], self.v[i])
        return {
            "qkv": (
                get["x"],
                scale,
                shift,
                EPS,
                self.qkv[i],
                self.cos,
                self.sin,
                HEADS,
                1,
                *keys,
                self.start,
                self.given,
            ),
            "attend": (get["q"], *keys, self.valid, DIM**-0.5, self.start),
            "out": (get["y"], self.out[i], gate, get["x"], None, self.given),
            "gate-up": (get["x"], mlp_scale, mlp_shift, EPS, self.gate_up[i], self.given),
            "down": (get["h"], self.down[i], mlp_gate, get["x"], None, self.given),
        }[op]

    def cross(self, i: int) -> tuple[Any, ...]:
        """What a cross block with the sizes of starVLA's gives norm_attend."""
        keys = self.memory[i].unbind(2)
        return (self.x, *self.query_table, EPS, self.query[i], self.query_bias, *keys, self.remembered, CROSS_HEADS)

    def layer(self, i: int, x: torch.Tensor, attention: bool) -> torch.Tensor:
        """One expert layer; without attention, q stands in for its result."""
        y = cuda.norm_qkv_rope(*self.arguments("qkv", i, x=x))
        if attention:
            y = cuda.attend(*self.arguments("attend", i, q=y))
        x = cuda.project_residual(*self.arguments("out", i, y=y.view(1, self.tokens, -1), x=x))
        hidden = cuda.norm_glu(*self.arguments("gate-up", i, x=x))
        return cuda.project_residual(*self.arguments("down", i, h=hidden, x=x))

    def solve(self, attention: bool = True) -> torch.Tensor:
        """All Euler steps."""
        state = self.noise
        scale, shift, _ = self.tables[0, -1]
        last = (scale, shift, EPS, self.action_out, self.bias_out)
        guide = None
        if self.given is not None:
            guide = Guide(self.previous, torch.zeros_like(state[..., 0]), self.given, 1.0, 0.5)
        for _ in range(STEPS):
            x = cuda.project_in(state, self.action_in, self.bias_in, torch.bfloat16)
            for i in range(LAYERS):
                x = self.layer(i, x, attention)
            state = cuda.norm_project_step(x, *last, state, -1 / STEPS, guide)
        return state


def functions() -> dict[str, Callable[..., torch.Tensor]]:
    """The function of each op that the bench names."""
    return {
        "qkv": cuda.norm_qkv_rope,
        "attend": cuda.attend,
        "out": cuda.project_residual,
        "gate-up": cuda.norm_glu,
        "down": cuda.project_residual,
        "cross": cross.norm_attend,
    }


def costs(tokens: int, keys: int) -> dict[str, Cost]:
    """The least each op must move and compute."""
    return {
        "qkv": cost.norm_qkv_rope(tokens, WIDTH, HEADS, 1, DIM),
        "attend": cost.attend(tokens, keys, HEADS, 1, DIM),
        "out": cost.project_residual(tokens, WIDTH, HEADS * DIM),
        "gate-up": cost.norm_glu(tokens, WIDTH, MLP),
        "down": cost.project_residual(tokens, WIDTH, MLP),
        "cross": cost.norm_attend(tokens, CROSS_KEYS, WIDTH, CROSS_HEADS, CROSS_DIM),
    }


def captured(body: Callable[[], object], dependent: bool = True) -> Callable[[], None]:
    """A replay of `body`, captured as a chain or as plain launches."""

    def whole() -> object:
        if not dependent:
            return body()
        with chain():
            return body()

    return harness.captured(whole)


def microseconds(replay: Callable[[], None], repeats: int = 30) -> float:
    """Median time of one replay."""
    times = [harness.elapsed(replay) for _ in range(repeats + 3)]
    return float(statistics.median(times[3:]))


def error(stack: Stack, op: str, function: Callable[..., torch.Tensor]) -> float:
    """Largest difference from the fp32 reference."""
    given = stack.arguments(op, 0)
    wide = [reference.dense(a).float() if isinstance(a, Packed) else a for a in given]
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a for a in wide]
    truth = getattr(reference, function.__name__)(*wide)
    found = function(*given)
    return float((found.double() - truth.double()).abs().max())


def rows(stack: Stack, roof: harness.Roof) -> Iterator[dict[str, Any]]:
    """One record an op: 180 calls in a chain, on rotating weights."""
    least = costs(stack.tokens, stack.start + stack.tokens)
    for op, function in functions().items():

        def many(op: str = op, function: Callable[..., torch.Tensor] = function) -> None:
            for _ in range(STEPS):
                for i in range(LAYERS):
                    function(*stack.arguments(op, i))

        plain, dependent = (microseconds(captured(many, d)) / (STEPS * LAYERS) for d in (False, True))
        case = Case("skinny", function.__name__, f"{op}, {stack.tokens} rows", least[op], lambda device: ())
        yield {**harness.row(case, roof, dependent, {"plain": plain}), "error": error(stack, op, function)}


def _weight(features: int, columns: int) -> torch.Tensor:
    return (_random(features, columns) / math.sqrt(columns)).bfloat16()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def main() -> None:
    """Prints ops, then whole solvers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--prefix", type=int, default=576)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    roof = harness.measure_roof(torch.device("cuda", torch.cuda.current_device()))
    stack = Stack(options.tokens, options.prefix)
    records = []
    for record in rows(stack, roof):
        records.append(record)
        print(f"{harness.line(record)}  plain {record['plain_us']:.2f} us  error {record['error']:.1e}", flush=True)
    for attention in (False, True):
        for dependent in (False, True):
            time = microseconds(captured(lambda a=attention: stack.solve(a), dependent))  # type: ignore[misc]
            label = f"solve, {'with' if attention else 'no'} attention, {'dependent' if dependent else 'plain'}"
            print(f"{label:40s} {time / 1e3:7.3f} ms  {time / (STEPS * LAYERS):6.2f} us a layer", flush=True)
    for length in (0, 1, options.tokens // 2):
        stack.given = torch.full((1, 1), length, dtype=torch.int32, device="cuda")
        time = microseconds(captured(stack.solve))
        label = f"solve, with attention, {length} rows given"
        print(f"{label:40s} {time / 1e3:7.3f} ms  {time / (STEPS * LAYERS):6.2f} us a layer", flush=True)
    if options.json:
        harness.write(options.json, records, roof)


if __name__ == "__main__":
    main()
