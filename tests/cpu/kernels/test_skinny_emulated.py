"""The few-row CUDA kernels, run by the emulator against fp32: their host code, their sources, in random orders."""

from collections.abc import Callable

import pytest
import torch
from emulated import emulated, needs_compiler

from innerloop.kernels import launch
from innerloop.kernels.euler import Guide
from innerloop.kernels.launch import Launch
from innerloop.kernels.skinny import cross, cuda, reference
from innerloop.kernels.skinny.packing import pack

pytestmark = needs_compiler
BF16, EPS = torch.bfloat16, 1e-6
WIDTH = 256
ROWS = (1, 7, 16, 41)


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written() -> object:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _random(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def _table(width: int = WIDTH) -> torch.Tensor:
    return _random(width, scale=0.3, dtype=torch.float32)


def _close(ours: torch.Tensor, truth: torch.Tensor, bound: float = 6e-3) -> None:
    assert float((ours.double() - truth.double()).norm() / truth.double().norm()) < bound


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("prefixed", [False, True])
def test_norm_and_gated_unit(rows: int, prefixed: bool) -> None:
    torch.manual_seed(rows)
    x, weight = _random(1, rows, WIDTH), _random(128, WIDTH, scale=WIDTH**-0.5)
    scale, shift = (torch.stack([_table(), _table()]) if prefixed else _table() for _ in range(2))
    prefix = torch.tensor([[rows // 2]], dtype=torch.int32) if prefixed else None
    for moved in (shift, None):
        if prefixed and moved is None:
            continue
        with emulated(seed=rows):
            ours = cuda.norm_glu(x, scale, moved, EPS, pack(weight, 64), prefix)
        _close(ours, reference.norm_glu(x.float(), scale, moved, EPS, weight.float(), prefix))


@pytest.mark.parametrize("rows", ROWS)
def test_norm_projection_rotation_and_cache(rows: int) -> None:
    torch.manual_seed(rows)
    heads, dim, start = 2, 32, 5
    x, weight = _random(1, rows, WIDTH), _random((heads + 2) * dim, WIDTH, scale=WIDTH**-0.5)
    angle = _random(1, rows, dim // 2, dtype=torch.float32)
    rest = (angle.cos(), angle.sin(), heads, 1)
    k, v = (torch.full((1, start + rows, 1, dim), torch.nan, dtype=BF16) for _ in range(2))
    k32, v32 = k.float(), v.float()
    scale, shift = _table(), _table()
    with emulated(seed=rows):
        q = cuda.norm_qkv_rope(x, scale, shift, EPS, pack(weight, dim // 2), *rest, k, v, start)
    _close(q, reference.norm_qkv_rope(x.float(), scale, shift, EPS, weight.float(), *rest, k32, v32, start))
    for ours, truth in ((k, k32), (v, v32)):
        _close(ours[:, start:], truth[:, start:])
        assert ours[:, :start].isnan().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_projection_gate_and_residual(rows: int, split: int) -> None:
    """Also over a cluster, whose programs send their sums to one."""
    torch.manual_seed(rows)
    inner, gate, bias = 512, _table(64), _random(64)
    y, residual, weight = _random(1, rows, inner), _random(1, rows, 64), _random(64, inner, scale=inner**-0.5)
    key = ("skinny linear", (cuda.RESIDUAL, 64, inner, rows))
    choice = Launch.of(inner // 128 // split, SPLIT=split, TILES=1, RESIDENT=1)
    with emulated(seed=split), launch.forced({key: choice}):
        ours = cuda.project_residual(y, pack(weight), gate, residual, bias)
    truth = reference.project_residual(y.float(), weight.float(), gate, residual.float(), bias.float())
    _close(ours, truth, 4e-3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gelu", [False, True])
def test_layer_norm_projection_and_bias(rows: int, gelu: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = _random(1, rows, WIDTH) + 0.3, _random(64, WIDTH, scale=WIDTH**-0.5), _random(64)
    for tables in ((1 + _table(), _table()), (None, None)):
        with emulated(seed=rows):
            ours = cuda.norm_linear(x, *tables, 1e-5, pack(weight), bias, gelu)
        _close(ours, reference.norm_linear(x.float(), *tables, 1e-5, weight.float(), bias.float(), gelu))


@pytest.mark.parametrize(("tokens", "keys"), [(1, 65), (7, 200), (10, 333), (33, 300)])
def test_attention_of_few_queries(tokens: int, keys: int) -> None:
    """Keys that are not valid are NaN; the last rows are those of the queries."""
    torch.manual_seed(keys)
    q, k, v = _random(1, tokens, 2, 256), _random(1, keys, 1, 256), _random(1, keys, 1, 256)
    valid = torch.ones(1, keys, dtype=torch.int32)
    valid[:, keys // 3 : keys // 2] = 0
    k[valid == 0] = v[valid == 0] = torch.nan
    with emulated(seed=keys):
        ours = cuda.attend(q, k, v, valid, 256**-0.5, keys - tokens)
    _close(ours, reference.attend(q.float(), k.float(), v.float(), valid, 256**-0.5, keys - tokens))


@pytest.mark.parametrize(
    ("heads", "dim", "width", "tokens", "keys", "split", "warps"),
    [
        (2, 64, 1024, 16, 192, 4, 8),
        (1, 64, 1024, 1, 1, 2, 8),
        (2, 64, 1024, 17, 200, 4, 4),
        (1, 48, 1536, 32, 169, 2, 8),
    ],
)
def test_norm_query_and_attention(
    heads: int, dim: int, width: int, tokens: int, keys: int, split: int, warps: int
) -> None:
    torch.manual_seed(keys)
    x, weight, bias = (
        _random(1, tokens, width) + 0.3,
        _random(heads * dim, width, scale=width**-0.5),
        _random(heads * dim),
    )
    scale, shift = 1 + _table(width), _table(width)
    k, v = _random(1, keys, 2, heads, dim).unbind(2)
    valid = torch.ones(1, keys, dtype=torch.int32)
    valid[:, keys // 3 : keys // 2] = 0
    k[valid == 0] = v[valid == 0] = torch.nan
    key = ("skinny norm_attend", (heads, dim, width, tokens, keys))
    with emulated(seed=keys), launch.forced({key: Launch.of(warps, SPLIT=split, RESIDENT=1)}):
        ours = cross.norm_attend(x, scale, shift, 1e-5, pack(weight), bias, k, v, valid, heads)
    truth = (x.float(), scale, shift, 1e-5, weight.float(), bias.float(), k.float(), v.float(), valid, heads)
    _close(ours, reference.norm_attend(*truth))


@pytest.mark.parametrize("guided", [False, True])
def test_the_ends_of_a_step(guided: bool) -> None:
    torch.manual_seed(3)
    tokens, actions, width = 3, 7, 128
    state = _random(1, tokens, actions, dtype=torch.float32)
    into, bias_in = _random(width, actions, dtype=torch.float32), _table(width)
    out, bias_out = _random(actions, width, scale=width**-0.5, dtype=torch.float32), _table(actions)
    for silu in (True, False):
        with emulated():
            x = cuda.project_in(state, into, bias_in, BF16, silu)
        _close(x, reference.project_in(state, into, bias_in, torch.float32, silu), 3e-3)
    guide = None
    if guided:
        previous, weight = _random(1, tokens, actions, dtype=torch.float32), _random(1, tokens, dtype=torch.float32)
        guide = Guide(previous, weight, torch.tensor([[2]], dtype=torch.int32), gain=1.5, time=0.4)
    for shift in (_table(width), None):
        rest = (_table(width), shift, EPS, out, bias_out, state, -0.1, guide)
        with emulated():
            stepped = cuda.norm_project_step(x, *rest)
        _close(stepped, reference.norm_project_step(x.float(), *rest), 1e-5)


def _product() -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    y, residual, weight = _random(1, 8, 512), _random(1, 8, 64), _random(64, 512, scale=512**-0.5)
    key = ("skinny linear", (cuda.RESIDUAL, 64, 512, 8))

    def call() -> torch.Tensor:
        with launch.forced({key: Launch.of(2, SPLIT=2, TILES=1, RESIDENT=1)}):
            return cuda.project_residual(y, pack(weight), None, residual)

    return call, reference.project_residual(y.float(), weight.float(), None, residual.float())


def _attention() -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    q, k, v = _random(1, 3, 2, 256), _random(1, 200, 1, 256), _random(1, 200, 1, 256)
    truth = reference.attend(q.float(), k.float(), v.float(), None, 256**-0.5, 197)
    return lambda: cuda.attend(q, k, v, None, 256**-0.5, 197), truth


def _norm_attention() -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    x, weight, bias = _random(1, 4, 1024), _random(64, 1024, scale=0.03), _random(64)
    k, v = _random(1, 40, 2, 1, 64).unbind(2)
    wide = (weight.float(), bias.float(), k.float(), v.float())
    truth = reference.norm_attend(x.float(), None, None, EPS, *wide, None, 1)
    return lambda: cross.norm_attend(x, None, None, EPS, pack(weight), bias, k, v, None, 1), truth


@pytest.mark.parametrize(
    ("made", "wait"),
    [
        (_product, "barrier_wait(shared_address(barriers) + t * 8, 0);"),  # for the weights
        (_product, "if (SPLIT > 1 && rank == 0) barrier_wait(arrived + g * 8, 0);"),  # for the sums of the cluster
        (_product, "if (SPLIT > 1 && g == 0) cluster_wait();"),  # for the barriers of the others
        (_product, "barrier_init(arrived + g * 8, 1)"),
        (_attention, "cluster_wait();"),
        (_attention, "barrier_wait(bar, 0);"),
        (_norm_attention, "cluster_wait();"),
        (_norm_attention, "barrier_wait(early, 0);"),
        (_norm_attention, "barrier_wait(arrived, 0);"),
    ],
)
def test_a_wait_that_is_missing_is_noticed(
    made: Callable[[], tuple[Callable[[], torch.Tensor], torch.Tensor]], wait: str
) -> None:
    """In one of a few random orders at least: the result is wrong, or the kernel does what none may."""
    call, truth = made()
    noticed = 0
    for seed in range(4):
        with emulated(seed=seed):
            _close(call(), truth)
        try:
            with emulated(seed=seed, altered=(wait, ";")):
                _close(call(), truth)
        except AssertionError:
            noticed += 1
    assert noticed
