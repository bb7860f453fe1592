"""Norm, query product and attention in one kernel: against fp32, over NaN, and under dependent launch with late producers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from few_rows import ON_HOPPER, error, random

from innerloop.kernels import launch, skinny
from innerloop.kernels.compile import compiled_with
from innerloop.kernels.launch import Launch
from innerloop.kernels.skinny import cross, cuda, reference
from innerloop.kernels.skinny.packing import Packed, pack
from innerloop.kernels.skinny.start import chain

pytestmark = [ON_HOPPER, pytest.mark.usefixtures("runs", "poisoned_allocations")]

EPS = 1e-5
PROGRAMS = [(2, 8), (4, 4), (4, 8), (8, 4)]  # of a head, and warps of each


class Block:
    """Query weight, tables and cached keys of a cross block; keys that are not valid are NaN."""

    def __init__(self, batch: int, tokens: int, keys: int, heads: int = 16, dim: int = 64, width: int = 1024) -> None:
        torch.manual_seed(tokens * 1000 + keys)
        self.heads, self.dim, self.width = heads, dim, width
        self.x = random(batch, tokens, width) + 0.3  # a mean to take off
        self.dense, self.bias = random(heads * dim, width, scale=width**-0.5), random(heads * dim)
        self.scale = 1 + random(width, scale=0.3, dtype=torch.float32)
        self.shift = random(width, scale=0.3, dtype=torch.float32)
        memory = random(batch, keys, 2, heads, dim, scale=1.5)
        self.valid = torch.ones(batch, keys, dtype=torch.int32, device="cuda")
        self.valid[:, keys // 3 : keys // 2] = 0
        self.valid[1:, : min(70, keys - 1)] = 0
        memory[self.valid == 0] = torch.nan
        self.k, self.v = memory.unbind(2)
        self.packed = pack(self.dense)

    def run(self, x: torch.Tensor | None = None) -> torch.Tensor:
        mod, rest = (self.scale, self.shift, EPS), (self.bias, self.k, self.v, self.valid, self.heads)
        return cross.norm_attend(self.x if x is None else x, *mod, self.packed, *rest)

    def run_with(self, split: int, warps: int) -> torch.Tensor:
        """With so many programs a head."""
        tokens, keys = self.x.shape[1], self.k.shape[1]
        shape = (len(self.x) * self.heads, self.dim, self.width, tokens, keys)
        with launch.forced({("skinny norm_attend", shape): Launch.of(warps, SPLIT=split, RESIDENT=1)}):
            return self.run()

    def errors(self, out: torch.Tensor, modulated: bool = True) -> tuple[float, float]:
        """Of `out` and of plain torch in bfloat16, from fp32."""
        mod = (self.scale, self.shift) if modulated else (None, None)
        same = (self.x, *mod, EPS, self.dense, self.bias, self.k, self.v, self.valid, self.heads)
        wide = (t.float() if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16 else t for t in same)
        truth = reference.norm_attend(*wide)
        return error(out, truth), error(reference.norm_attend(*same), truth)


ALL_ONCE = """
import test_norm_attend as t
for division in t.PROGRAMS:
    print("programs a head and warps:", division, flush=True)
    t.Block(1, 16, 192).run_with(*division)
    t.torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def runs() -> None:
    """Every division of a head ran to its end in another process: a fault on the device would end all tests of this one."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, env = [sys.executable, "-c", ALL_ONCE], {**os.environ, "PYTHONPATH": path}
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"the kernel never ends: {late.stdout!r}", pytrace=False)
    if ended.returncode:
        pytest.fail(f"the kernel does not run: {ended.stdout}{ended.stderr}", pytrace=False)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 32])
@pytest.mark.parametrize("keys", [2, 63, 182, 192, 200, 320])
def test_against_fp32(batch: int, tokens: int, keys: int) -> None:
    block = Block(batch, tokens, keys)
    out = block.run()
    found, plain = block.errors(out)
    assert found <= 2 * plain
    assert torch.equal(out, block.run())
    block.valid.zero_()
    assert (block.run() == 0).all()


@pytest.mark.parametrize(("heads", "dim", "width"), [(12, 64, 768), (32, 48, 1536), (8, 128, 1024), (16, 64, 2048)])
def test_other_widths(heads: int, dim: int, width: int) -> None:
    block = Block(1, 11, 169, heads, dim, width)
    found, plain = block.errors(block.run())
    assert found <= 2 * plain


def test_without_tables_and_mask_one_key() -> None:
    block = Block(1, 5, 1)
    block.valid.fill_(1)
    block.k, block.v = random(1, 1, 2, 16, 64).unbind(2)
    out = cross.norm_attend(block.x, None, None, EPS, block.packed, block.bias, block.k, block.v, None, 16)
    assert torch.equal(out, block.v.reshape(1, 1, -1).expand(1, 5, -1))


@pytest.mark.parametrize("keys", [192, 320])
@pytest.mark.parametrize(("split", "warps"), PROGRAMS)
def test_any_number_of_programs_a_head(split: int, warps: int, keys: int) -> None:
    block = Block(1, 16, keys)
    found, plain = block.errors(block.run_with(split, warps))
    assert found <= 2 * plain


def test_more_tokens_than_the_kernel_takes_go_through_two() -> None:
    block = Block(1, 41, 182)
    assert not cross.fits(block.x, block.packed, block.k, block.heads)
    rest = (block.bias, block.k, block.v, block.valid, block.heads)
    out = skinny.norm_attend(block.x, block.scale, block.shift, EPS, block.packed, *rest)
    found, plain = block.errors(out)
    assert found <= 2 * plain


def _layer(block: Block, out: Packed, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cuda.project_residual(block.run(x), out, None, x, bias)


@pytest.mark.parametrize("altered", ["attend", "out"])
def test_a_late_neighbour_is_waited_for(altered: str) -> None:
    """300 replays of four layers with one kind of store 20 us late have the bits of plain launches."""
    torch.use_deterministic_algorithms(False)
    block, out, bias = Block(1, 16, 192), pack(random(1024, 1024, scale=1 / 32)), random(1024)

    def run(**defines: int) -> torch.Tensor:
        x = block.x
        for _ in range(4):
            with compiled_with(**(defines if altered == "attend" else {})):
                y = block.run(x)
            with compiled_with(**(defines if altered == "out" else {})):
                x = cuda.project_residual(y, out, None, x, bias)
        return x

    expected = run().clone()
    with chain():
        run(DELAY=20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), chain():
        result = run(DELAY=20)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        result.fill_(torch.nan)
        graph.replay()
        wrong += (result != expected).sum()
    assert int(wrong) == 0


def test_a_consumer_that_does_not_wait_is_caught() -> None:
    torch.use_deterministic_algorithms(False)
    block, out, bias = Block(1, 16, 192), pack(random(1024, 1024, scale=1 / 32)), random(1024)
    y = random(1, 16, 1024)
    expected = block.run(cuda.project_residual(y, out, None, block.x, bias)).clone()

    def both() -> torch.Tensor:
        with chain():
            with compiled_with(DELAY=20):
                x = cuda.project_residual(y, out, None, block.x, bias)
            with compiled_with(UNGUARDED=1):
                result = block.run(x)
        x.fill_(torch.nan)
        return result

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both()
    graph.replay()
    assert not torch.equal(result, expected)


def test_a_chain_of_layers_has_the_bits_of_single_kernels() -> None:
    torch.use_deterministic_algorithms(False)
    block, out, bias = Block(2, 16, 320), pack(random(1024, 1024, scale=1 / 32)), random(1024)
    first = _layer(block, out, bias, block.x)
    expected = _layer(block, out, bias, first).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), chain():
        result = _layer(block, out, bias, _layer(block, out, bias, block.x))
    for _ in range(50):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)
