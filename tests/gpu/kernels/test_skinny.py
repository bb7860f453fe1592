"""The few-row kernels on a GPU: against fp32, over NaN-poisoned outputs, and under dependent launch with late producers."""

from collections.abc import Callable

import pytest
import torch
from few_rows import DIM, EPS, HEADS, MLP, ON_HOPPER, SIZES, Layer, Solver, error, random

from innerloop.kernels import euler
from innerloop.kernels.compile import compiled_with
from innerloop.kernels.skinny import cuda, reference
from innerloop.kernels.skinny.packing import pack
from innerloop.kernels.skinny.start import chain

pytestmark = [ON_HOPPER, pytest.mark.usefixtures("poisoned_allocations")]


@pytest.mark.parametrize(("batch", "tokens", "keys"), SIZES)
def test_against_fp32(batch: int, tokens: int, keys: int) -> None:
    layer = Layer(batch, tokens, keys)
    for modulated in (True, False):
        shift, gate = (layer.shift, layer.gate) if modulated else (None, None)
        k, v = torch.full_like(layer.k, torch.nan), torch.full_like(layer.v, torch.nan)
        k32, v32 = k.float(), v.float()
        rest = (layer.cos, layer.sin, HEADS, 1)
        q = cuda.norm_qkv_rope(layer.x, layer.scale, shift, EPS, pack(layer.qkv, DIM // 2), *rest, k, v, layer.start)
        truth = reference.norm_qkv_rope(
            layer.x.float(), layer.scale, shift, EPS, layer.qkv.float(), *rest, k32, v32, layer.start
        )
        assert error(q, truth) < 6e-3
        assert error(k[:, layer.start :], k32[:, layer.start :]) < 6e-3
        assert error(v[:, layer.start :], v32[:, layer.start :]) < 6e-3
        assert k[:, : layer.start].isnan().all()
        h = cuda.norm_glu(layer.x, layer.scale, shift, EPS, pack(layer.gate_up, MLP))
        assert error(h, reference.norm_glu(layer.x.float(), layer.scale, shift, EPS, layer.gate_up.float())) < 6e-3
        for y, weight in ((layer.y, layer.out), (layer.h, layer.down)):
            out = cuda.project_residual(y, pack(weight), gate, layer.x)
            assert error(out, reference.project_residual(y.float(), weight.float(), gate, layer.x.float())) < 4e-3


@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 33, 48, 64])
@pytest.mark.parametrize("width", [768, 1024, 1536])
def test_layer_norm_and_biases_against_fp32(tokens: int, width: int) -> None:
    torch.manual_seed(tokens + width)
    x = random(1, tokens, width) + 0.3  # a mean to take off
    scale, shift = 1 + random(width, scale=0.3, dtype=torch.float32), random(width, scale=0.3, dtype=torch.float32)
    for rows, gelu in ((width, False), (4 * width, True)):
        weight, bias = random(rows, width, scale=width**-0.5), random(rows)
        for mod in ((scale, shift), (None, None)):
            out = cuda.norm_linear(x, *mod, 1e-5, pack(weight), bias, gelu)
            truth = reference.norm_linear(x.float(), *mod, 1e-5, weight.float(), bias.float(), gelu)
            assert error(out, truth) < 6e-3
    for inner in (width, 4 * width):
        if not cuda.can_multiply(
            y := random(1, tokens, inner), packed := pack(random(width, inner, scale=inner**-0.5))
        ):
            continue
        bias = random(width)
        out = cuda.project_residual(y, packed, None, x, bias)
        dense = reference.dense(packed).float()
        assert error(out, reference.project_residual(y.float(), dense, None, x.float(), bias.float())) < 4e-3


@pytest.mark.parametrize(("batch", "tokens", "keys"), SIZES)
def test_attend_against_fp32(batch: int, tokens: int, keys: int) -> None:
    layer = Layer(batch, tokens, keys)
    scale = DIM**-0.5
    for valid in (layer.valid, None):
        k, v = layer.k.clone(), layer.v.clone()
        if valid is not None:
            k[valid == 0] = torch.nan
            v[valid == 0] = torch.nan
        out = cuda.attend(layer.q, k, v, valid, scale, layer.start)
        truth = reference.attend(layer.q.float(), k.float(), v.float(), valid, scale, layer.start)
        assert error(out, truth) < 6e-3
    nothing = cuda.attend(layer.q, layer.k, layer.v, torch.zeros_like(layer.valid), scale, layer.start)
    assert (nothing == 0).all()


@pytest.mark.parametrize(("batch", "tokens", "keys"), SIZES[:6])
def test_steps_against_fp32(batch: int, tokens: int, keys: int) -> None:
    layer = Layer(batch, tokens, keys)
    x = cuda.project_in(layer.state, layer.action_in, layer.bias_in, torch.bfloat16)
    truth = reference.project_in(layer.state, layer.action_in, layer.bias_in, torch.float32)
    assert error(x, truth) < 3e-3
    for shift in (layer.shift, None):
        args = (layer.scale, shift, EPS, layer.action_out, layer.bias_out, layer.state, -0.1)
        stepped = cuda.norm_project_step(layer.x, *args)
        assert error(stepped, reference.norm_project_step(layer.x.float(), *args)) < 1e-5


def _pairs(
    layer: Layer,
) -> dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[[list[torch.Tensor]], torch.Tensor]]]:
    """Producer (its outputs: what the consumer may only read late) and consumer, for each neighbour in a step."""
    qkv, out = pack(layer.qkv, DIM // 2), pack(layer.out)
    gate_up, down = pack(layer.gate_up, MLP), pack(layer.down)
    new_k, new_v = (c[:, layer.start :] for c in (layer.k, layer.v))

    def make_qkv(x: torch.Tensor) -> list[torch.Tensor]:
        q = cuda.norm_qkv_rope(
            x, layer.scale, layer.shift, EPS, qkv, layer.cos, layer.sin, HEADS, 1, layer.k, layer.v, layer.start
        )
        return [q, new_k, new_v]

    def mix(q: torch.Tensor) -> torch.Tensor:
        return cuda.attend(q, layer.k, layer.v, layer.valid, DIM**-0.5, layer.start)

    def glu(x: torch.Tensor) -> torch.Tensor:
        return cuda.norm_glu(x, layer.scale, layer.shift, EPS, gate_up)

    def residual(y: torch.Tensor, weight: cuda.Packed) -> torch.Tensor:
        return cuda.project_residual(y, weight, layer.gate, layer.x)

    def enter() -> torch.Tensor:
        return cuda.project_in(layer.state, layer.action_in, layer.bias_in, torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return cuda.norm_project_step(
            x, layer.scale, layer.shift, EPS, layer.action_out, layer.bias_out, layer.state, -0.1
        )

    return {
        "enter-qkv": (lambda: [enter()], lambda o: make_qkv(o[0])[0]),
        "qkv-attend": (lambda: make_qkv(layer.x), lambda o: mix(o[0])),
        "attend-out": (lambda: [mix(layer.q)], lambda o: residual(o[0], out)),
        "out-glu": (lambda: [residual(layer.y, out)], lambda o: glu(o[0])),
        "glu-down": (lambda: [glu(layer.x)], lambda o: residual(o[0], down)),
        "down-qkv": (lambda: [residual(layer.h, down)], lambda o: make_qkv(o[0])[0]),
        "down-step": (lambda: [residual(layer.h, down)], lambda o: step(o[0])),
        "enter-step": (lambda: [enter()], lambda o: step(o[0])),
        "step-enter": (
            lambda: [step(layer.x)],
            lambda o: cuda.project_in(o[0], layer.action_in, layer.bias_in, torch.bfloat16),
        ),
    }


PAIRS = ["enter-qkv", "qkv-attend", "attend-out", "out-glu", "glu-down", "down-qkv", "enter-step", "step-enter"]


@pytest.mark.parametrize("name", [*PAIRS, "down-step"])
def test_a_late_producer_is_waited_for(name: str) -> None:
    """1,000 replays with stores 20 us late are bit-equal; a consumer that does not wait is caught.

    Not so after `down`, whose programs leave no multiprocessor the room for a program of `step` to start early.
    """
    torch.use_deterministic_algorithms(False)
    layer = Layer(1, 10, 586)
    producer, consumer = _pairs(layer)[name]
    expected = consumer(producer()).clone()

    def capture(**consumer_defines: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        def both() -> torch.Tensor:
            with chain():
                with compiled_with(DELAY=20):
                    made = producer()
                with compiled_with(**consumer_defines):
                    result = consumer(made)
            for tensor in made:
                tensor.fill_(torch.nan)
            return result

        both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = both()
        return graph, result

    graph, result = capture()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph.replay()
        wrong += (result != expected).sum()
    assert int(wrong) == 0
    if name in PAIRS:
        graph, result = capture(UNGUARDED=1)
        graph.replay()
        assert not torch.equal(result, expected)


def test_a_captured_chain_keeps_its_dependent_launches_and_its_bits() -> None:
    from cuda.bindings import driver

    torch.use_deterministic_algorithms(False)
    layer = Layer(1, 10, 586)
    producer, consumer = _pairs(layer)["glu-down"]
    expected = consumer(producer()).clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph), chain():
        result = consumer(producer())
    _, _, _, edges, _ = driver.cuGraphGetEdges(graph.raw_cuda_graph(), 16)
    kinds = [int(e.type) for e in edges]
    assert int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC) in kinds
    graph.instantiate()
    for _ in range(100):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)


PHASES = ["in", "qkv", "attend", "out", "glu", "down", "step", "all"]


@pytest.mark.parametrize("tokens", [10, 50])
def test_a_whole_chain_has_the_bits_of_single_kernels(tokens: int) -> None:
    torch.use_deterministic_algorithms(False)
    solver = Solver(tokens)
    expected = solver.run()
    keys = [one.k.clone() for one in solver.layers]
    graph, result = solver.captured("")
    for _ in range(20):
        result.fill_(torch.nan)
        for one in solver.layers:
            one.k[:, one.start :] = torch.nan
            one.v[:, one.start :] = torch.nan
        graph.replay()
        assert torch.equal(result, expected)
        assert all(torch.equal(one.k, key) for one, key in zip(solver.layers, keys, strict=True))


@pytest.mark.parametrize("phase", PHASES)
def test_a_chain_with_late_stores_has_the_same_bits(phase: str) -> None:
    """1,000 replays with one kernel's stores (or all) 20 us late."""
    torch.use_deterministic_algorithms(False)
    solver = Solver(10)
    expected = solver.run()
    graph, result = solver.captured(phase, DELAY=20)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph.replay()
        wrong += (result != expected).sum()
    assert int(wrong) == 0


def test_a_chain_runs_eagerly() -> None:
    torch.use_deterministic_algorithms(False)
    solver = Solver(10)
    expected = solver.run()
    for _ in range(20):
        with chain():
            assert torch.equal(solver.run(), expected)


def test_guidance_pulls_a_step_and_weight_zero_changes_no_bit() -> None:
    generator = torch.Generator("cuda").manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    x, state, previous = draw(2, 10, 1024).to(torch.bfloat16), draw(2, 10, 32), draw(2, 10, 32)
    scale, shift, weight, bias = draw(1024), draw(1024), draw(32, 1024) / 32, draw(32)
    weights = torch.linspace(0, 1, 20, device="cuda").view(2, 10)
    nothing = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    for pull, gain, time in ((weights, 4.25, 0.8), (torch.zeros_like(weights), 10.0, 1.0)):
        guide = euler.Guide(previous, pull, nothing, gain, time)
        found = cuda.norm_project_step(x, scale, shift, 1e-6, weight, bias, state, -0.1, guide)
        truth = reference.norm_project_step(x, scale, shift, 1e-6, weight, bias, state, -0.1, guide)
        torch.testing.assert_close(found, truth, atol=2e-5, rtol=2e-5)
    plain = cuda.norm_project_step(x, scale, shift, 1e-6, weight, bias, state, -0.1)
    assert torch.equal(found, plain)
    prefix = torch.tensor([[3], [10]], dtype=torch.int32, device="cuda")
    imposed = cuda.norm_project_step(
        x, scale, shift, 1e-6, weight, bias, state, -0.1, euler.Guide(previous, pull, prefix, gain, time)
    )
    assert torch.equal(imposed[0, :3], previous[0, :3])
    assert torch.equal(imposed[1], previous[1])
    assert torch.equal(imposed[0, 3:], plain[0, 3:])
