"""Attention out of a fused projection: sizes off the tiles, head groups, masks with holes, causal, q/k norm."""

from typing import Any

import pytest
import torch
from agreement import agree

from innerloop.kernels import attention, launch, rope
from innerloop.kernels.attention import reference
from innerloop.kernels.attention import triton as kernel
from innerloop.kernels.launch import Launch

DTYPES = (torch.float32, torch.bfloat16)


def _arguments(
    batch: int, tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, normed: bool = False
) -> tuple[list[Any], tuple[Any, ...]]:
    """What comes before `key_valid`, and what follows `causal`."""
    q, kv = heads
    angle = torch.randn(batch, tokens, dim // 2)
    qkv = torch.randn(batch, tokens, (q + 2 * kv) * dim).to(dtype)
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-5) if normed else ()
    return [qkv, angle.cos(), angle.sin(), q, kv], norms


def _masked(qkv: torch.Tensor, heads: tuple[int, int], *valid: list[int]) -> torch.Tensor:
    """Marks the listed keys of each batch entry valid and poisons keys and values of the others."""
    mask = torch.zeros(qkv.shape[:2], dtype=torch.int32)
    for entry, keys in zip(mask, valid, strict=True):
        entry[keys] = 1
    q, kv = heads
    first = q * (qkv.shape[2] // (q + 2 * kv))
    qkv[..., first:].masked_fill_((mask == 0)[..., None], float("nan"))
    return mask


def _agree(*arguments: Any) -> None:
    """Rotated rows are rounded, then results are."""
    agree("attention", "rotary_attention", *arguments, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim"),
    [(2, 1, (4, 2), 16), (2, 7, (4, 1), 32), (1, 63, (2, 2), 64), (1, 65, (4, 2), 128), (2, 20, (3, 3), 72)],
)
def test_sizes(batch: int, tokens: int, heads: tuple[int, int], dim: int, causal: bool, dtype: torch.dtype) -> None:
    before, _ = _arguments(batch, tokens, heads, dim, dtype)
    _agree(*before, None, dim**-0.5, causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_layer(dtype: torch.dtype) -> None:
    before, norms = _arguments(1, 182, (4, 1), 128, dtype, normed=True)
    mask = _masked(before[0], (4, 1), list(range(170)))
    _agree(*before, mask, 128**-0.5, True, *norms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_of_two_sizes(dtype: torch.dtype) -> None:
    before, _ = _arguments(2, 196, (2, 2), 64, dtype)
    mask = _masked(before[0], (2, 2), list(range(196)), list(range(130)))
    _agree(*before, mask, 64**-0.5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile(causal: bool, normed: bool) -> None:
    before, norms = _arguments(2, 37, (4, 2), 24, torch.float32, normed)
    mask = _masked(before[0], (4, 2), [*range(3, 9), *range(20, 36)], [*range(17)])
    for rows, keys, ahead in ((16, 16, 0), (16, 32, 1), (32, 16, 1), (64, 64, 1), (64, 64, 0), (128, 16, 0)):
        choice = Launch.of(4, 1, BLOCK_M=rows, BLOCK_N=keys, AHEAD=ahead)
        with launch.forced({("attention.rotary_narrow", (74, 37, 24, 4)): choice}):
            _agree(*before, mask, 0.2, causal, *norms)


def test_queries_that_see_no_key_give_zeros() -> None:
    before, _ = _arguments(2, 6, (2, 1), 16, torch.float32)
    mask = _masked(before[0], (2, 1), [], [3, 4, 5])
    out = kernel.rotary_attention(*before, mask, 0.25, causal=True)
    value = before[0].view(2, 6, 4, 16)[1, 3, 3]
    assert (out[0] == 0).all()
    assert (out[1, :3] == 0).all()
    assert torch.allclose(out[1, 3], value.repeat(2))


def test_angles_shared_by_the_batch_and_a_slice_of_a_wider_product() -> None:
    before, _ = _arguments(2, 19, (2, 1), 16, torch.float32)
    wide = torch.randn(2, 19, 80)
    for own in (wide[..., 8:72], wide[:, :, :64]):
        before[0] = own
        before[1], before[2] = (angles[:1].expand(2, -1, -1) for angles in before[1:3])
        _agree(*before, None, 0.25)
    before[2] = before[2].contiguous()
    _agree(*before, None, 0.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_meaning_is_that_of_the_two_ops(dtype: torch.dtype) -> None:
    before, norms = _arguments(2, 21, (4, 2), 16, dtype, normed=True)
    mask = _masked(before[0], (4, 2), list(range(20)), list(range(5)))
    qkv, cos, sin = before[:3]
    k, v = torch.empty(2, 2, 21, 2, 16, dtype=dtype)
    q = rope.rotate_and_store(qkv, cos, sin, 4, 2, k, v, 0, *norms)
    expected = attention.attention(q, k, v, mask, 0.25, True)
    for one in (attention, reference):
        assert torch.equal(one.rotary_attention(*before, mask, 0.25, True, *norms), expected)


def test_the_same_bits_twice() -> None:
    before, _ = _arguments(1, 40, (4, 1), 32, torch.float32)
    assert torch.equal(*(kernel.rotary_attention(*before, None, 0.25, True) for _ in range(2)))
