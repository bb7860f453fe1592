"""Attention: head groups, masks with holes, causal offsets, splits over keys; invalid keys hold NaN."""

import pytest
import torch
from agreement import agree

from innerloop.kernels import launch
from innerloop.kernels.attention import ahead, whole
from innerloop.kernels.attention import triton as kernel
from innerloop.kernels.launch import Launch

DTYPES = (torch.float32, torch.bfloat16)
SMALL = Launch.of(4, 1, BLOCK_M=16, BLOCK_N=16, SPLIT=1, BULK=0)


def _qkv(sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    batch, tokens, keys, heads, kv_heads, dim = sizes
    rows = ((tokens, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(batch, n, h, dim).to(dtype) for n, h in rows]


def _mask(k: torch.Tensor, v: torch.Tensor, *valid: list[int]) -> torch.Tensor:
    """Marks the listed keys of each batch entry valid and poisons the others."""
    mask = torch.zeros(k.shape[:2], dtype=torch.int32)
    for entry, keys in zip(mask, valid, strict=True):
        entry[keys] = 1
    k[mask == 0] = float("nan")
    v[mask == 0] = float("nan")
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(2, 7, 50, 4, 2, 16), (1, 3, 33, 2, 2, 72), (1, 1, 5, 3, 1, 40), (2, 20, 20, 2, 2, 24), (1, 9, 200, 4, 1, 32)],
)
def test_full(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    agree("attention", "attention", *_qkv(sizes, dtype), None, sizes[-1] ** -0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_holes_in_the_mask(dtype: torch.dtype) -> None:
    q, k, v = _qkv((2, 5, 150, 8, 1, 32), dtype)
    mask = _mask(k, v, [*range(3, 40), *range(90, 99), 149], list(range(64, 128)))
    agree("attention", "attention", q, k, v, mask, 0.2)


def test_every_length_up_to_capacity() -> None:
    q, keys, values = _qkv((1, 2, 40, 2, 1, 16), torch.float32)
    with launch.forced({("attention.many", (4, 40, 16, 4, 1)): SMALL}):
        for length in range(1, 41):
            k, v = keys.clone(), values.clone()
            agree("attention", "attention", q, k, v, _mask(k, v, list(range(length))), 0.25)


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_splits_over_keys(split: int) -> None:
    q, k, v = _qkv((2, 3, 80, 4, 1, 16), torch.float32)
    choice = Launch.of(4, 1, BLOCK_M=16, BLOCK_N=16, SPLIT=split, BULK=0)
    mask = _mask(k, v, [*range(17), *range(48, 53)], [79])
    with launch.forced({("attention.few", (12, 80, 16, 4, 1)): choice}), launch.recorded() as used:
        agree("attention", "attention", q, k, v, mask, 0.25)
    assert ("attention.combine" in {op for op, _ in used}) == (split > 1)


def test_many_heads_over_few_keys_are_not_split() -> None:
    for heads, keys, split in ((16, 192, False), (16, 272, True), (2, 192, True)):
        q, k, v = _qkv((1, 3, keys, heads, heads, 16), torch.float32)
        with launch.recorded() as used:
            agree("attention", "attention", q, k, v, _mask(k, v, list(range(keys - 10))), 0.25)
        assert ("attention.combine" in {op for op, _ in used}) == split


def test_no_valid_key_gives_zeros() -> None:
    for keys in (20, 80):
        q, k, v = _qkv((2, 3, keys, 2, 1, 16), torch.float32)
        out = kernel.attention(q, k, v, _mask(k, v, [], [4]), 0.25)
        assert (out[0] == 0).all()
        assert torch.allclose(out[1], v[1, 4, 0].repeat(2).expand(3, 32))


@pytest.mark.parametrize(("tokens", "keys"), [(40, 40), (5, 37), (1, 9)])
def test_causal(tokens: int, keys: int) -> None:
    q, k, v = _qkv((1, tokens, keys, 4, 2, 24), torch.float32)
    agree("attention", "attention", q, k, v, None, 0.2, True)
    mask = _mask(k, v, [*range(2), *range(4, keys)])
    agree("attention", "attention", q, k, v, mask, 0.2, True)


def test_causal_rows_before_the_first_valid_key_give_zeros() -> None:
    q, k, v = _qkv((1, 6, 6, 1, 1, 16), torch.float32)
    out = kernel.attention(q, k, v, _mask(k, v, [3, 4, 5]), 0.25, causal=True)
    assert (out[0, :3] == 0).all()
    assert torch.allclose(out[0, 3], v[0, 3, 0])


def test_strided_views_of_one_projection() -> None:
    qkv = torch.randn(2, 19, 3, 2, 24)
    agree("attention", "attention", *qkv.unbind(2), None, 0.2)


def test_the_same_bits_twice() -> None:
    q, k, v = _qkv((1, 4, 100, 4, 1, 16), torch.float32)
    assert torch.equal(kernel.attention(q, k, v, None, 0.25), kernel.attention(q, k, v, None, 0.25))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("dim", "causal"), [(32, False), (16, True)])
def test_bulk_copies(dim: int, causal: bool, split: int) -> None:
    choice = Launch.of(4, 1, BLOCK_M=16, BLOCK_N=16, SPLIT=split, BULK=1)
    q, k, v = _qkv((2, 9, 70, 4, 2, dim), torch.float32)
    with (
        launch.forced({("attention.many", (18, 70, dim, 4, m)): choice for m in (0, 1)}),
        launch.forced({("attention.few", (18, 70, dim, 4, m)): choice for m in (0, 1)}),
    ):
        agree("attention", "attention", q, k, v, None, 0.2, causal)
        mask = _mask(k, v, [*range(3, 40), *range(48, 64), 69], [*range(16, 64)])
        agree("attention", "attention", q, k, v, mask, 0.2, causal)


def test_bulk_copies_of_strided_views() -> None:
    choice = Launch.of(4, 1, BLOCK_M=16, BLOCK_N=16, SPLIT=1, BULK=1)
    with launch.forced({("attention.many", (64, 64, 32, 4, 0)): choice}):
        agree("attention", "attention", *torch.randn(2, 64, 3, 2, 32).unbind(2), None, 0.2)
        unaligned = torch.randn(2, 64, 3, 2, 33)[..., 1:]
        agree("attention", "attention", *unaligned.unbind(2), None, 0.2)


def test_only_aligned_whole_heads_are_copied_in_bulk() -> None:
    assert kernel._copies_in_bulk(torch.zeros(1, 8, 2, 32))
    for unfit in (torch.zeros(1, 8, 2, 33)[..., 1:], torch.zeros(1, 8, 2, 24), torch.zeros(1, 8, 2, 8)):
        assert not kernel._copies_in_bulk(unfit)


@pytest.mark.parametrize("tokens", [1, 33, 51])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_new_tokens_over_a_cache_that_is_read_ahead(
    tokens: int, batch: int, heads: int, kv_heads: int, masked: bool
) -> None:
    """A start within a block and at its edge; what is invalid, or lies beyond the last key, is NaN."""
    for start, tile in ((41, 32), (32, 32), (0, 16)):
        keys = start + tokens
        q, k, v = _qkv((batch, tokens, keys, heads, kv_heads, 32), torch.bfloat16)
        mask = _mask(k, v, *[[*range(0, keys, 3), keys - 1], [*range(keys - 1, keys)]][:batch]) if masked else None
        shape = (tokens * heads // kv_heads, batch * kv_heads, keys, 32, 2)
        choice = Launch.of(4, 1, BLOCK_M=32, BLOCK_N=tile)
        lines = ("attention.combine", (shape[0] * shape[1], 32))
        forced = {("attention.ahead", shape): choice, lines: Launch.of(4, BLOCK_R=32)}
        with launch.dependent_launch(), launch.forced(forced), launch.recorded() as used:
            agree("attention", "continued", q, k, v, mask, 0.2, start, roundings=2)
        assert {op for op, _ in used} == {"attention.ahead", "attention.combine"}


def test_nothing_is_read_ahead_outside_a_chain() -> None:
    q, k, v = _qkv((1, 3, 80, 4, 1, 16), torch.bfloat16)
    with launch.recorded() as used:
        ours = kernel.continued(q, k, v, None, 0.25, 77)
    assert "attention.ahead" not in {op for op, _ in used}
    assert torch.equal(ours, kernel.attention(q, k, v, None, 0.25))


def test_nothing_is_read_ahead_of_the_copy_that_makes_it() -> None:
    q, k, v = _qkv((1, 3, 80, 4, 2, 16), torch.bfloat16)
    turned = (v.mT.contiguous().mT, k.mT.contiguous().mT)
    shape = (6, 2, 80, 16, 2)
    with (
        launch.dependent_launch(),
        launch.forced({("attention.ahead", shape): Launch.of(4, 1, BLOCK_M=32, BLOCK_N=16)}),
    ):
        for keys, values in ((k, turned[0]), (turned[1], v)):
            with launch.recorded() as used:
                ours = kernel.continued(q, keys, values, None, 0.25, 77)
            assert "attention.ahead" not in {op for op, _ in used}
            assert torch.equal(ours, kernel.attention(q, k, v, None, 0.25))


def test_blocks_ahead_stand_two_a_multiprocessor_at_most() -> None:
    device = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
    for tokens, keys in ((33, 609), (50, 570), (50, 722), (64, 1018)):
        found = launch.candidates(ahead.TABLE, (8 * tokens, 1, keys, 256, 2), device)
        assert found[0] != ahead.APART
        for choice in found[:-1]:
            assert -(-8 * tokens // choice["BLOCK_M"]) * -(-keys // choice["BLOCK_N"]) <= 264
    assert launch.candidates(ahead.TABLE, (400, 8, 722, 256, 2), device) == [ahead.APART]
    assert launch.candidates(ahead.TABLE, (400, 1, 722, 256, 4), device) == [ahead.APART]


def _at_once(
    rows: int, units: int, keys: int, dim: int, memory: bool, causal: bool = False
) -> dict[launch.Key, Launch]:
    return {("attention.whole", (rows, units, keys, dim, 2, int(memory), int(causal))): Launch.of(4, 1, BLOCK_M=16)}


@pytest.mark.parametrize("keys", [19, 23, 32, 41, 64])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "dim"), [(1, 3, 3, 24), (2, 4, 2, 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_all_keys_at_once(keys: int, batch: int, heads: int, kv_heads: int, dim: int, masked: bool) -> None:
    """A block more or less, whole and not; what is invalid is NaN; one entry may see no key at all."""
    tokens = 19
    q, k, v = _qkv((batch, tokens, keys, heads, kv_heads, dim), torch.bfloat16)
    mask = _mask(k, v, *[[*range(0, keys, 3), keys - 1], []][:batch]) if masked else None
    sizes = (tokens * heads // kv_heads, batch * kv_heads, keys, dim)
    forced = _at_once(*sizes, True) | _at_once(*sizes, False) | _at_once(*sizes, False, causal=True)
    with launch.dependent_launch(), launch.forced(forced), launch.recorded() as used:
        agree("attention", "remembered", q, k, v, mask, 0.2)
        for causal in (False, True):
            agree("attention", "attention", q, k, v, mask, 0.2, causal)
    assert set(used) == set(forced)


def test_fewer_keys_than_one_block() -> None:
    q, k, v = _qkv((1, 3, 5, 2, 2, 16), torch.bfloat16)
    with launch.dependent_launch(), launch.forced(_at_once(3, 2, 5, 16, True)):
        agree("attention", "remembered", q, k, v, None, 0.2)


def test_a_memory_between_other_heads() -> None:
    """As a DiT holds it: keys and values of every cross block in one buffer."""
    held = torch.randn(1, 21, 3, 2, 2, 24).bfloat16()
    q, (k, v) = torch.randn(1, 5, 2, 24).bfloat16(), held[:, :, 1].unbind(2)
    with launch.dependent_launch(), launch.forced(_at_once(5, 2, 21, 24, True)), launch.recorded() as used:
        agree("attention", "remembered", q, k, v, None, 0.2)
    assert {op for op, _ in used} == {"attention.whole"}


def test_outside_a_chain_keys_come_in_blocks() -> None:
    q, k, v = _qkv((1, 3, 20, 2, 2, 16), torch.bfloat16)
    with launch.recorded() as used:
        ours = kernel.remembered(q, k, v, None, 0.25)
    assert "attention.whole" not in {op for op, _ in used}
    assert torch.equal(ours, kernel.attention(q, k, v, None, 0.25))


def test_keys_that_a_program_cannot_hold_come_in_blocks() -> None:
    device = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
    for shape in ((41, 32, 176, 48, 2, 1, 0), (49, 12, 320, 64, 2, 1, 0), (338, 8, 169, 128, 2, 0, 1)):
        assert launch.candidates(whole.TABLE, shape, device)[0] != whole.APART
    for shape in ((41, 32, 1200, 48, 2, 1, 0), (41, 32, 176, 48, 4, 1, 0), (41, 512, 176, 48, 2, 1, 0)):
        assert launch.candidates(whole.TABLE, shape, device) == [whole.APART]
    for shape in ((768, 8, 192, 128, 2, 0, 1), (41, 32, 41, 48, 2, 0, 0)):  # blocks are faster
        assert launch.candidates(whole.TABLE, shape, device) == [whole.APART]
