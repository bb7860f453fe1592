"""One expert layer and a short solver over the few-row kernels, dense beside packed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from innerloop.kernels import euler
from innerloop.kernels.compile import compiled_with
from innerloop.kernels.skinny import cuda
from innerloop.kernels.skinny.packing import pack
from innerloop.kernels.skinny.start import chain

WIDTH, HEADS, DIM, MLP, ACTIONS, EPS = 1024, 8, 256, 4096, 32, 1e-6
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs bulk copies"
)

SIZES = [
    (1, 1, 65),
    (1, 7, 333),
    (1, 8, 586),
    (1, 10, 586),
    (1, 16, 1017),
    (2, 10, 722),
    (1, 33, 300),
    (1, 50, 1018),
    (1, 64, 650),
]


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@dataclass
class Layer:
    """Weights, tables, inputs and cache of one expert layer, dense beside packed."""

    batch: int
    tokens: int
    keys: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.tokens * 7 + self.batch)
        b, t = self.batch, self.tokens
        self.qkv = random((HEADS + 2) * DIM, WIDTH, scale=WIDTH**-0.5)
        self.out = random(WIDTH, HEADS * DIM, scale=(HEADS * DIM) ** -0.5)
        self.gate_up = random(2 * MLP, WIDTH, scale=WIDTH**-0.5)
        self.down = random(WIDTH, MLP, scale=MLP**-0.5)
        self.x, self.y, self.h = random(b, t, WIDTH), random(b, t, HEADS * DIM), random(b, t, MLP)
        self.scale, self.shift, self.gate = (random(WIDTH, scale=0.3, dtype=torch.float32) for _ in range(3))
        angle = random(b, t, DIM // 2, scale=3.0, dtype=torch.float32)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.start = self.keys - t
        self.k, self.v = random(b, self.keys, 1, DIM), random(b, self.keys, 1, DIM)
        self.valid = torch.ones(b, self.keys, dtype=torch.int32, device="cuda")
        self.valid[:, self.keys // 3 : self.keys // 2] = 0
        self.q = random(b, t, HEADS, DIM)
        self.state = random(b, t, ACTIONS, dtype=torch.float32)
        self.action_in = random(WIDTH, ACTIONS, scale=ACTIONS**-0.5, dtype=torch.float32)
        self.action_out = random(ACTIONS, WIDTH, scale=WIDTH**-0.5, dtype=torch.float32)
        self.bias_in, self.bias_out = random(WIDTH, dtype=torch.float32), random(ACTIONS, dtype=torch.float32)


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth.double()).norm() / truth.double().norm())


def second_rows(*tables: torch.Tensor) -> list[torch.Tensor]:
    """Each table [D] above another one, with the distance that rows have in a solver's table."""
    pairs = [random(4, len(table), scale=0.3, dtype=torch.float32)[::3] for table in tables]
    for pair, table in zip(pairs, tables, strict=True):
        pair[0] = table
    return pairs


class Solver:
    """Three layers, two Euler steps: every kernel of a chain beside each of its neighbours, and an odd number of layers."""

    def __init__(self, tokens: int) -> None:
        self.layers = [Layer(1, tokens, 586) for _ in range(3)]
        for i, layer in enumerate(self.layers):
            layer.x = layer.y = layer.h = layer.q = None
            layer.scale = layer.scale + 0.1 * i
        self.packs = [
            (pack(one.qkv, DIM // 2), pack(one.out), pack(one.gate_up, MLP), pack(one.down)) for one in self.layers
        ]
        self.tables = [(one.scale, one.shift, one.gate) for one in self.layers]
        self.prefix: torch.Tensor | None = None

    def give(self, length: int) -> None:
        """From now on this many rows are given; a captured chain reads another length, not another pointer."""
        if self.prefix is None:
            self.prefix = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
            self.tables = [second_rows(one.scale, one.shift, one.gate) for one in self.layers]
            self.previous = random(*self.layers[0].state.shape, dtype=torch.float32)
        self.prefix.fill_(length)

    def run(self, altered: str = "", **defines: int) -> torch.Tensor:
        """The state after both steps; kernels named by `altered` are compiled with `defines`."""

        def call(name: str, function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
            with compiled_with(**(defines if altered in (name, "all") else {})):
                return function(*args)

        first, prefix = self.layers[0], self.prefix
        state, guide = first.state, None
        if prefix is not None:
            state = euler.impose(state, self.previous, prefix)
            guide = euler.Guide(self.previous, torch.zeros_like(state[..., 0]), prefix, 1.0, 0.5)
        for _ in range(2):
            x = call("in", cuda.project_in, state, first.action_in, first.bias_in, torch.bfloat16)
            for one, (scale, shift, gate), (qkv, out, gate_up, down) in zip(
                self.layers, self.tables, self.packs, strict=True
            ):
                mod = (scale, shift, EPS)
                rest = (one.cos, one.sin, HEADS, 1, one.k, one.v, one.start)
                q = call("qkv", cuda.norm_qkv_rope, x, *mod, qkv, *rest, prefix)
                y = call("attend", cuda.attend, q, one.k, one.v, one.valid, DIM**-0.5, one.start)
                x = call("out", cuda.project_residual, y, out, gate, x, None, prefix)
                h = call("glu", cuda.norm_glu, x, *mod, gate_up, prefix)
                x = call("down", cuda.project_residual, h, down, gate, x, None, prefix)
            last = (first.scale, first.shift, EPS, first.action_out, first.bias_out)
            state = call("step", cuda.norm_project_step, x, *last, state, -0.5, guide)
        return state

    def captured(self, altered: str, **defines: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        with chain():
            self.run(altered, **defines)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), chain():
            result = self.run(altered, **defines)
        return graph, result
