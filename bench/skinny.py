"""Few-row linears: microseconds an expert layer, op by op and as the whole solver chain, with rotating weights."""

import argparse
import statistics
from collections.abc import Callable

import torch

from innerloop.kernels import launch
from innerloop.kernels.launch import Launch
from innerloop.kernels.skinny import cuda, pack

LAYERS, STEPS, WIDTH, HEADS, DIM, MLP, ACTIONS, EPS = 18, 10, 1024, 8, 256, 4096, 32, 1e-6


class Stack:
    """18 layers with distinct weights and K/V; inputs for `tokens` rows."""

    def __init__(self, tokens: int, prefix: int) -> None:
        torch.manual_seed(0)
        self.tokens, self.start = tokens, prefix
        self.qkv = [pack(_random((HEADS + 2) * DIM, WIDTH), DIM // 2) for _ in range(LAYERS)]
        self.out = [pack(_random(WIDTH, HEADS * DIM)) for _ in range(LAYERS)]
        self.gate_up = [pack(_random(2 * MLP, WIDTH), MLP) for _ in range(LAYERS)]
        self.down = [pack(_random(WIDTH, MLP)) for _ in range(LAYERS)]
        self.k, self.v = (torch.randn(LAYERS, 1, prefix + tokens, 1, DIM, device="cuda").bfloat16() for _ in range(2))
        self.valid = torch.ones(1, prefix + tokens, dtype=torch.int32, device="cuda")
        self.norms = torch.randn(2 * LAYERS + 1, 3, WIDTH, device="cuda") * 0.2
        angle = torch.randn(1, tokens, DIM // 2, device="cuda")
        self.cos, self.sin = angle.cos(), angle.sin()
        self.action_in, self.action_out = (
            torch.randn(*s, device="cuda") / 8 for s in ((WIDTH, ACTIONS), (ACTIONS, WIDTH))
        )
        self.bias_in, self.bias_out = torch.zeros(WIDTH, device="cuda"), torch.zeros(ACTIONS, device="cuda")
        self.noise = torch.randn(1, tokens, ACTIONS, device="cuda")
        self.x = torch.randn(1, tokens, WIDTH, device="cuda").bfloat16()
        self.y = torch.randn(1, tokens, HEADS * DIM, device="cuda").bfloat16()
        self.h = torch.randn(1, tokens, MLP, device="cuda").bfloat16()
        self.q = torch.randn(1, tokens, HEADS, DIM, device="cuda").bfloat16()

    def run_qkv(self, i: int, x: torch.Tensor) -> torch.Tensor:
        scale, shift, _ = self.norms[2 * i]
        return cuda.norm_qkv_rope(
            x, scale, shift, EPS, self.qkv[i], self.cos, self.sin, HEADS, 1, self.k[i], self.v[i], self.start
        )

    def run_attend(self, i: int, q: torch.Tensor) -> torch.Tensor:
        return cuda.attend(q, self.k[i], self.v[i], self.valid, DIM**-0.5, self.start)

    def run_out(self, i: int, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cuda.project_residual(y, self.out[i], self.norms[2 * i, 2], x)

    def run_glu(self, i: int, x: torch.Tensor) -> torch.Tensor:
        scale, shift, _ = self.norms[2 * i + 1]
        return cuda.norm_glu(x, scale, shift, EPS, self.gate_up[i])

    def run_down(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cuda.project_residual(h, self.down[i], self.norms[2 * i + 1, 2], x)

    def layer(self, i: int, x: torch.Tensor, attention: bool) -> torch.Tensor:
        q = self.run_qkv(i, x)
        y = self.run_attend(i, q) if attention else q.view(1, self.tokens, -1)
        x = self.run_out(i, y, x)
        return self.run_down(i, self.run_glu(i, x), x)

    def solve(self, attention: bool = True) -> torch.Tensor:
        state = self.noise
        scale, shift, _ = self.norms[-1]
        for _ in range(STEPS):
            x = cuda.project_in(state, self.action_in, self.bias_in, torch.bfloat16)
            for i in range(LAYERS):
                x = self.layer(i, x, attention)
            state = cuda.norm_project_step(x, scale, shift, EPS, self.action_out, self.bias_out, state, -1 / STEPS)
        return state


def _random(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()


def captured(body: Callable[[], object], dependent: bool = True) -> Callable[[], None]:
    """A replay of `body`, captured as a chain or as plain launches."""

    def whole() -> object:
        if not dependent:
            return body()
        with cuda.chain():
            return body()

    whole()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = whole()
    graph.kept = kept
    return graph.replay


def microseconds(replay: Callable[[], None], repeats: int = 30) -> float:
    """Median time of one replay."""
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def operators(stack: Stack) -> dict[str, tuple[float, float]]:
    """Microseconds of each op, 180 of it in a row on rotating weights, plain and dependent."""
    bodies = {
        "norm_qkv_rope": lambda i: stack.run_qkv(i, stack.x),
        "attend": lambda i: stack.run_attend(i, stack.q),
        "project_residual out": lambda i: stack.run_out(i, stack.y, stack.x),
        "norm_glu": lambda i: stack.run_glu(i, stack.x),
        "project_residual down": lambda i: stack.run_down(i, stack.h, stack.x),
    }
    result = {}
    for name, body in bodies.items():

        def many(body: Callable[[int], object] = body) -> None:
            for _ in range(STEPS):
                for i in range(LAYERS):
                    body(i)

        plain, dependent = (microseconds(captured(many, p)) / (STEPS * LAYERS) for p in (False, True))
        result[name] = (plain, dependent)
    return result


def variant(stack: Stack, phase: int, n: int, k: int, choice: Launch) -> None:
    launch._forced[(cuda.LINEAR.op, (phase, n, k, stack.tokens))] = choice


def variants(stack: Stack) -> None:
    """The chain with other launches than the table's first."""
    qkv, glu = (cuda.NORM_QKV_ROPE, (HEADS + 2) * DIM, WIDTH), (cuda.NORM_GLU, 2 * MLP, WIDTH)
    out, down = (cuda.RESIDUAL, WIDTH, HEADS * DIM), (cuda.RESIDUAL, WIDTH, MLP)

    def of(warps: int, split: int, tiles: int, resident: int) -> Launch:
        return Launch.of(warps, SPLIT=split, TILES=tiles, RESIDENT=resident)

    cases: dict[str, dict[tuple[int, int, int], Launch]] = {
        "table": {},
        "qkv 2 resident": {qkv: of(8, 1, 1, 2)},
        "qkv 3 resident": {qkv: of(8, 1, 1, 3)},
        "qkv, glu 3 resident": {qkv: of(8, 1, 1, 3), glu: of(8, 1, 4, 3)},
        "glu tiles 2": {glu: of(8, 1, 2, 1)},
        "out split 1": {out: of(16, 1, 1, 1)},
        "out split 4": {out: of(4, 4, 1, 1)},
        "down split 4": {down: of(8, 4, 1, 1)},
        "down split 2, 2 resident": {down: of(16, 2, 1, 2)},
        "all slim": {qkv: of(8, 1, 1, 3), glu: of(8, 1, 4, 3), down: of(16, 2, 1, 2), out: of(8, 2, 1, 3)},
        "all slim, out 1, down 4": {
            qkv: of(8, 1, 1, 3),
            glu: of(8, 1, 4, 3),
            down: of(8, 4, 1, 3),
            out: of(16, 1, 1, 2),
        },
    }
    for name, choices in cases.items():
        launch._forced.clear()
        for (phase, n, k), choice in choices.items():
            variant(stack, phase, n, k, choice)
        print(f"{name:32s} {microseconds(captured(stack.solve)) / (STEPS * LAYERS):6.2f} us a layer", flush=True)
    launch._forced.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--prefix", type=int, default=576)
    parser.add_argument("--variants", action="store_true")
    arguments = parser.parse_args()
    stack = Stack(arguments.tokens, arguments.prefix)
    for name, (plain, dependent) in operators(stack).items():
        print(f"{name:24s} {plain:6.2f} us  dependent {dependent:6.2f} us", flush=True)
    for attention in (False, True):
        for dependent in (False, True):
            time = microseconds(captured(lambda a=attention: stack.solve(a), dependent))
            label = f"solve, {'with' if attention else 'no'} attention, {'dependent' if dependent else 'plain'}"
            print(f"{label:40s} {time / 1e3:7.3f} ms  {time / (STEPS * LAYERS):6.2f} us a layer", flush=True)
    if arguments.variants:
        variants(stack)


if __name__ == "__main__":
    main()
