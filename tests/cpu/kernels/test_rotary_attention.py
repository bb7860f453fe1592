"""Full attention out of a fused projection: sizes off the tiles, masks with holes, slices of a wider product."""

from typing import Any

import pytest
import torch
from agreement import agree

from innerloop.kernels import attention, launch, rope
from innerloop.kernels.attention import reference
from innerloop.kernels.attention import triton as kernel
from innerloop.kernels.launch import Launch

DTYPES = (torch.float32, torch.bfloat16)


def _arguments(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Any]:
    """What comes before `key_valid`."""
    angle = torch.randn(batch, tokens, dim // 2)
    return [torch.randn(batch, tokens, 3 * heads * dim).to(dtype), angle.cos(), angle.sin(), heads]


def _masked(qkv: torch.Tensor, *valid: list[int]) -> torch.Tensor:
    """Marks the listed keys of each batch entry valid and poisons keys and values of the others."""
    mask = torch.zeros(qkv.shape[:2], dtype=torch.int32)
    for entry, keys in zip(mask, valid, strict=True):
        entry[keys] = 1
    qkv[..., qkv.shape[2] // 3 :].masked_fill_((mask == 0)[..., None], float("nan"))
    return mask


def _agree(*arguments: Any) -> None:
    """Rotated rows are rounded, then results are."""
    agree("attention", "rotary_attention", *arguments, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim"), [(2, 1, 4, 16), (2, 7, 1, 32), (1, 63, 2, 64), (1, 65, 2, 64), (2, 20, 3, 72)]
)
def test_sizes(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    _agree(*_arguments(batch, tokens, heads, dim, dtype), None, dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_of_two_sizes(dtype: torch.dtype) -> None:
    before = _arguments(2, 196, 2, 64, dtype)
    _agree(*before, _masked(before[0], list(range(196)), list(range(130))), 64**-0.5)


@pytest.mark.parametrize(
    ("rows", "keys", "ahead"), [(16, 16, 0), (16, 32, 1), (32, 16, 1), (64, 64, 1), (64, 64, 0), (128, 16, 0)]
)
def test_every_tile(rows: int, keys: int, ahead: int) -> None:
    before = _arguments(2, 37, 2, 24, torch.float32)
    mask = _masked(before[0], [*range(3, 9), *range(20, 36)], [*range(17)])
    choice = Launch.of(4, 1, BLOCK_M=rows, BLOCK_N=keys, AHEAD=ahead)
    with launch.forced({("attention.rotary", (37, 4, 24, 4)): choice}):
        _agree(*before, mask, 0.2)


def test_without_a_valid_key_the_result_is_zero() -> None:
    before = _arguments(2, 6, 2, 16, torch.float32)
    mask = _masked(before[0], [], [3])
    out = kernel.rotary_attention(*before, mask, 0.25)
    value = before[0].view(2, 6, 3, 32)[1, 3, 2]
    assert (out[0] == 0).all()
    assert torch.allclose(out[1], value.expand(6, -1))


def test_angles_shared_by_the_batch_and_a_slice_of_a_wider_product() -> None:
    before = _arguments(2, 19, 2, 16, torch.float32)
    wide = torch.randn(2, 19, 112)
    for own in (wide[..., 8:104], wide[:, :, :96]):
        before[0] = own
        before[1], before[2] = (angles[:1].expand(2, -1, -1) for angles in before[1:3])
        _agree(*before, None, 0.25)
    before[2] = before[2].contiguous()
    _agree(*before, None, 0.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_meaning_is_that_of_the_two_ops(dtype: torch.dtype) -> None:
    before = _arguments(2, 21, 2, 16, dtype)
    mask = _masked(before[0], list(range(20)), list(range(5)))
    qkv, cos, sin, _ = before
    k, v = torch.empty(2, 2, 21, 2, 16, dtype=dtype)
    q = rope.rotate_and_store(qkv, cos, sin, 2, 2, k, v, 0)
    expected = attention.attention(q, k, v, mask, 0.25)
    for one in (attention, reference):
        assert torch.equal(one.rotary_attention(*before, mask, 0.25), expected)


def test_the_same_bits_twice() -> None:
    before = _arguments(1, 40, 2, 32, torch.float32)
    assert torch.equal(*(kernel.rotary_attention(*before, None, 0.25) for _ in range(2)))
