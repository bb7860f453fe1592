"""Rotation and K/V write: lengths, grouped heads, offsets, rows that must stay untouched."""

import pytest
import torch
from agreement import agree

from innerloop.kernels.rope import triton as kernel


def _arguments(tokens: int, heads: tuple[int, int], dim: int, start: int, dtype: torch.dtype) -> list[object]:
    q, kv = heads
    angle = torch.randn(2, tokens, dim // 2)
    caches = [torch.zeros(2, start + tokens + 3, kv, dim, dtype=dtype) for _ in range(2)]
    qkv = torch.randn(2, tokens, (q + 2 * kv) * dim).to(dtype)
    return [qkv, angle.cos(), angle.sin(), q, kv, *caches, start]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (0, 1), (3, 3)])
def test_against_reference(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    agree("rope", "rotate_and_store", *_arguments(tokens, heads, 24, 5, dtype), written=(5, 6))


def test_head_norms() -> None:
    weights = torch.randn(2, 16)
    agree("rope", "rotate_and_store", *_arguments(5, (4, 2), 16, 0, torch.float32), *weights, 1e-5, written=(5, 6))


def test_touches_only_its_rows() -> None:
    arguments = _arguments(4, (2, 1), 16, 3, torch.float32)
    k, v = torch.full((2, 2, 9, 1, 16), float("nan"))
    arguments[5:7] = [k, v]
    kernel.rotate_and_store(*arguments)  # type: ignore[arg-type]
    for cache in (k, v):
        assert cache[:, 3:7].isfinite().all()
        assert cache[:, :3].isnan().all()
        assert cache[:, 7:].isnan().all()


def test_rotation_keeps_lengths_and_turns_by_the_angle() -> None:
    qkv = torch.randn(1, 1, 3 * 8)
    angle = torch.full((1, 1, 4), torch.pi / 2)
    cache = torch.zeros(1, 1, 1, 8)
    q = kernel.rotate_and_store(qkv, angle.cos(), angle.sin(), 1, 1, cache, cache.clone(), 0).flatten()
    assert torch.allclose(q, torch.cat((-qkv[0, 0, 4:8], qkv[0, 0, :4])), atol=1e-6)
