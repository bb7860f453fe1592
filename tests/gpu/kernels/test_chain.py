"""The dense DiT's chain of dependent launches: own tiles against fp32, and every kernel behind a producer that is late."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from few_rows import ON_HOPPER
from late import Call, behind_delayed, captured, one_after_another, starts_early, unguarded

from bench.case import earned
from innerloop.blocks import dit_head
from innerloop.blocks.dit import DiT, DiTSizes
from innerloop.kernels import attention, launch, linear, norm, use_kernels
from innerloop.kernels.attention.reference import attention as reference_attention
from innerloop.kernels.linear import reference

pytestmark = ON_HOPPER
BF16 = torch.bfloat16
WIDTH, HEADS, DIM = 1536, 32, 48
PAIRS = (
    "shares-norm",
    "norm-q",
    "norm-up",
    "q-memory",
    "q-memory of many keys",
    "q-attention",
    "qkv-attention",
    "attention-out",
    "up-down",
)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def _consumers(rows: int) -> dict[str, tuple[torch.Tensor, Call]]:
    """Every kernel of a block: what its predecessor leaves for it, and the call."""
    torch.manual_seed(rows)
    square, wide, deep = (
        _random(n, k, scale=k**-0.5) for n, k in ((WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    )
    bias, long_bias, x, scale = _random(WIDTH), _random(4 * WIDTH), _random(1, rows, WIDTH), _random(2, WIDTH).float()
    k, v = _random(1, 320, 2, HEADS, DIM).unbind(2)
    few, every = ((torch.arange(320, device="cuda") < n).int()[None] for n in (160, 310))

    def added(shares: torch.Tensor) -> Any:
        return norm.add_layer_norm(x, shares, scale[0], scale[1], 1e-5, bias)

    def mixed(keys: int, valid: torch.Tensor, call: Any = attention.remembered) -> Call:
        cut = slice(0, keys)
        return lambda q: call(q.view(1, rows, HEADS, DIM), k[:, cut], v[:, cut], valid[:, cut].contiguous(), DIM**-0.5)

    def own(qkv: torch.Tensor) -> Any:
        q, k, v = qkv.view(1, rows, 3, HEADS, DIM).unbind(2)
        return attention.attention(q, k, v, None, DIM**-0.5)

    short, full, apart = mixed(169, few), mixed(320, every), mixed(320, every, attention.attention)
    return {
        "shares-norm": (_random(5, 1, rows, WIDTH), added),
        "norm-q": (_random(1, rows, WIDTH), lambda y: linear.linear(y, square, bias)),
        "norm-up": (_random(1, rows, WIDTH), lambda y: linear.linear(y, wide, long_bias, "gelu_tanh")),
        "q-memory": (_random(1, rows, WIDTH), short),
        "q-memory of many keys": (_random(1, rows, WIDTH), full),
        "q-attention": (_random(1, rows, WIDTH), apart),
        "qkv-attention": (_random(1, rows, 3 * WIDTH), own),
        "attention-out": (_random(1, rows, WIDTH), lambda y: linear.deferred(y, square, bias)[0]),
        "up-down": (_random(1, rows, 4 * WIDTH), lambda y: linear.deferred(y, deep, bias)[0]),
    }


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("rows", [1, 7, 16, 41, 48, 63, 64])
def test_own_tiles_against_fp32(rows: int) -> None:
    torch.manual_seed(rows)
    for columns, inner in ((WIDTH, WIDTH), (3 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (200, 1544)):
        x, weight, bias = _random(1, rows, inner), _random(columns, inner, scale=inner**-0.5), _random(columns)
        wide = x.float(), weight.float(), bias.float()
        plain = reference.linear(*wide), reference.linear(x, weight, bias)
        curved = reference.linear(*wide, "gelu_tanh"), reference.linear(x, weight, bias, "gelu_tanh")
        with launch.dependent_launch(), launch.recorded() as used:
            linear.linear(x, weight, bias)
            linear.deferred(x, weight, bias)
        for key, table in used.items():
            for choice in launch.candidates(table, key[1], launch.limits(x.device)):
                with launch.dependent_launch(), launch.forced({key: choice}):
                    if key[0] == "linear.chained":
                        earned(f"{choice}", linear.linear(x, weight, bias), plain[1], plain[0])
                        earned(f"{choice}", linear.linear(x, weight, bias, "gelu_tanh"), curved[1], curved[0])
                        continue
                    shares, left = linear.deferred(x, weight, bias)
                    assert left is bias
                    slack = len(shares) * 2.0**-9  # each is rounded to 16 bits
                    earned(f"{choice}", shares.float().sum(0) + bias.float(), plain[1], plain[0], slack)


@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "heads", "kv_heads", "dim"),
    [
        (1, 41, 169, HEADS, HEADS, DIM),
        (1, 49, 320, 12, 12, 64),
        (2, 17, 235, 8, 8, 64),
        (1, 5, 33, 8, 2, 128),
        (1, 169, 169, 16, 8, 128),
        (1, 192, 192, 32, 8, 128),
    ],
)
def test_every_tile_of_all_keys_at_once_against_fp32(
    batch: int, tokens: int, keys: int, heads: int, kv_heads: int, dim: int
) -> None:
    """Keys and values between those of other blocks; what does not count is NaN."""
    torch.manual_seed(keys)
    q, held = _random(batch, tokens, heads, dim), _random(batch, keys, 3, 2, kv_heads, dim)
    valid = (torch.rand(batch, keys, device="cuda") < 0.7).int()
    held[valid == 0] = float("nan")
    k, v = held[:, :, 1].unbind(2)
    wide = q.float(), k.float(), v.float()
    calls: list[tuple[bool, Any]] = [(False, attention.remembered)]
    if keys == tokens == 169:
        calls.append((True, lambda *given: attention.attention(*given, causal=True)))
    for causal, call in calls:
        same = reference_attention(q, k, v, valid, dim**-0.5, causal)
        truth = reference_attention(*wide, valid, dim**-0.5, causal)
        with launch.dependent_launch(), launch.recorded() as used:
            call(q, k, v, valid, dim**-0.5)
        (key, table), *_ = used.items()
        assert key[0] == "attention.whole"
        tiles = [c for c in launch.candidates(table, key[1], launch.limits(q.device)) if c.warps]
        assert tiles
        for choice in tiles:
            with launch.dependent_launch(), launch.forced({key: choice}):
                earned(f"{causal} {choice}", call(q, k, v, valid, dim**-0.5), same, truth)


@pytest.mark.parametrize("name", PAIRS)
def test_a_late_producer_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured: a kernel neither reads what its predecessor has yet to write, nor writes what that has yet to read.

    Without its wait it does, at one number of rows at least: at the other it may find no room before that has ended.
    """
    early = []
    for rows in (16, 41):
        with monkeypatch.context() as patched:
            early.append(starts_early(*_consumers(rows)[name], patched))
    assert any(early)


@pytest.fixture(scope="module")
def dit() -> DiT:
    """Three blocks of GR00T's width: across, within, across."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = DiT(DiTSizes(HEADS, DIM, 3, context_width=64, interleave=True, output=1024))
    for parameter in made.parameters():
        parameter.data = _random(*parameter.shape, scale=parameter.shape[-1] ** -0.5)
    return made.requires_grad_(False)


def _inputs(dit: DiT, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    table = torch.randn(dit.sizes.table_rows, 2, WIDTH, device="cuda") * 0.3
    table[:, 0] += 1.0
    valid = (torch.arange(169, device="cuda") < 160).int()[None]
    return _random(1, rows, WIDTH), table, _random(*dit.sizes.memory_shape(1, 169)), valid


@pytest.mark.parametrize("rows", [16, 41, 64])
def test_the_transformer_against_fp32_and_without_overlap(dit: DiT, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, table, memory, valid = _inputs(dit, rows)
    with use_kernels("reference"):
        same = dit(x, table, memory, valid)
        dit.float()
        truth = dit(x.float(), table, memory.float(), valid)
        dit.to(BF16)
    with launch.recorded() as used:
        ours = dit(x, table, memory, valid)
    assert {"linear.chained", "linear.chained_shares", "norm", "attention.whole"} <= {op for op, _ in used}
    earned(f"{rows} rows", ours, same, truth, 2.0**-8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapped = dit(x, table, memory, valid)
    one_after_another(monkeypatch)
    for seed in range(50):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(overlapped, dit(x, table, memory, valid))


@pytest.mark.parametrize(("actions", "prefix"), [(132, 1), (7, 0), (33, 24)])
def test_a_step_against_fp32_and_without_overlap(
    dit: DiT, actions: int, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a chunk to the next: entry, transformer, decoder; rows that are held keep their bits."""
    _, table, memory, valid = _inputs(dit, 41)
    hidden, chunk = 1024, 40

    def affine(name: str, rows: int, columns: int, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
        weight, bias = _random(rows, columns, scale=columns**-0.5), _random(rows)
        return {f"{name}_weight": weight.to(dtype), f"{name}_bias": bias.to(dtype)}

    w = {
        "action_table": _random(WIDTH, actions, scale=actions**-0.5).float(),
        "time_table": _random(4, WIDTH).float(),
        "modulation": table.expand(4, -1, -1, -1).contiguous(),
        "place": _random(50, WIDTH),
        **affine("action_out", WIDTH, WIDTH),
        **affine("exit", hidden, WIDTH),
        **affine("decode_out", actions, hidden, torch.float32),
    }
    before = _random(1, prefix, WIDTH) if prefix else None
    x, hold = torch.randn(1, chunk, actions, device="cuda"), torch.zeros(1, chunk, device="cuda")
    hold[:, :3], hold[:, 3] = 1.0, 0.25

    def step(x: torch.Tensor, w: dict[str, torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
        ground = dit_head.ground(w, None if before is None else before.to(memory.dtype), 1, chunk)
        return dit_head.step(dit, w, 1, x, ground, memory, valid, hold)

    with use_kernels("reference"):
        same = step(x, w, memory)
        dit.float()
        truth = step(x, {name: value.float() for name, value in w.items()}, memory.float())
        dit.to(BF16)
    graph, overlapped = captured(lambda: step(x, w, memory))
    graph.replay()
    earned("step", overlapped, same, truth, 2.0**-8)
    assert torch.equal(overlapped[:, :3], x[:, :3])
    one_after_another(monkeypatch)
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(overlapped, step(x, w, memory))


def test_every_pair_of_the_transformer_with_late_producers(dit: DiT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's result reaches the next through a copy that lets that one start, sleeps, and then writes."""
    inputs = _inputs(dit, 41)

    with monkeypatch.context() as plain:
        one_after_another(plain)
        expected = dit(*inputs)
    delayed = ((linear, "linear"), (linear, "deferred"), (norm, "add_layer_norm"), (attention, "attention"))
    for module, name in (*delayed, (attention, "remembered")):
        monkeypatch.setattr(module, name, behind_delayed(getattr(module, name)))

    graph, result = captured(lambda: dit(*inputs))
    for _ in range(20):
        graph.replay()
        assert torch.equal(expected, result)
    unguarded(monkeypatch)
    graph, result = captured(lambda: dit(*inputs))
    graph.replay()
    assert not torch.equal(expected, result)
