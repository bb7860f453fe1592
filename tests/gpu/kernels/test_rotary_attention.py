"""Full attention out of a fused projection on a CUDA device: sizes off the tiles, masks, every choice of kernels."""

from typing import Any

import pytest
import torch

from bench.case import earned
from innerloop.kernels import attention, launch, use_kernels
from innerloop.kernels.attention import reference, rotary
from innerloop.kernels.attention import triton as kernel
from innerloop.kernels.launch import Launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _arguments(tokens: int, dim: int, dtype: torch.dtype) -> tuple[list[Any], torch.Tensor]:
    """Two images, 3 heads; the second image lacks keys here and there, which hold NaN."""
    torch.manual_seed(tokens)
    angle = torch.rand(2, tokens, dim // 2, device="cuda") * 6.0
    qkv = torch.randn(2, tokens, 9 * dim, device="cuda").to(dtype)
    valid = torch.ones(2, tokens, dtype=torch.int32, device="cuda")
    valid[1, tokens // 2 :: 3] = 0
    qkv[..., 3 * dim :].masked_fill_((valid == 0)[..., None], float("nan"))
    return [qkv, angle.cos(), angle.sin(), 3], valid


def _widened(values: list[Any]) -> list[Any]:
    return [v.float() if torch.is_tensor(v) and v.dtype is torch.bfloat16 else v for v in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "masked"), [(64, True), (72, False)])
@pytest.mark.parametrize("tokens", [1, 7, 63, 65, 196])
def test_against_fp32(tokens: int, dim: int, masked: bool, dtype: torch.dtype) -> None:
    before, valid = _arguments(tokens, dim, dtype)
    if not masked:
        before[0].nan_to_num_(0.5)
    call = [*before, valid if masked else None, dim**-0.5]
    ours, same = kernel.rotary_attention(*call), reference.rotary_attention(*call)
    earned(f"{tokens} tokens of {dim}", ours, same, reference.rotary_attention(*_widened(call)), slack=2e-5)


@pytest.mark.parametrize("choice", rotary.TABLE.default, ids=str)
def test_every_tile(choice: Launch) -> None:
    """Also those that are for more heads than here."""
    before, valid = _arguments(196, 64, torch.bfloat16)
    call = [*before, valid, 0.125]
    with launch.forced({("attention.rotary", (196, 6, 64, 2)): choice}), launch.recorded() as used:
        ours = kernel.rotary_attention(*call)
    assert used.keys() == {("attention.rotary", (196, 6, 64, 2))}
    earned(
        str(choice), ours, reference.rotary_attention(*call), reference.rotary_attention(*_widened(call)), slack=2e-5
    )


@pytest.mark.parametrize(("tokens", "dim"), [(196, 64), (300, 64), (70, 72)])
def test_choices_of_kernels_agree(tokens: int, dim: int) -> None:
    before, valid = _arguments(tokens, dim, torch.bfloat16)
    call = [*before, valid, dim**-0.5]
    same, truth = reference.rotary_attention(*call), reference.rotary_attention(*_widened(call))
    for kind in ("reference", "operators", "fused"):
        with use_kernels(kind):
            earned(f"{kind}, {tokens} tokens of {dim}", attention.rotary_attention(*call), same, truth)


def test_one_capture_serves_every_length() -> None:
    before, valid = _arguments(150, 64, torch.bfloat16)
    before[0].nan_to_num_(0.5)
    call = [*before, valid, 0.125]
    kernel.rotary_attention(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.rotary_attention(*call)
    for length in range(0, 151, 7):
        valid.zero_()[:, :length] = 1
        graph.replay()
        truth = reference.rotary_attention(*_widened(call))
        earned(f"{length} keys", out, reference.rotary_attention(*call), truth)
