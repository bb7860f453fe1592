"""Norm, query product and attention as one op: its meaning, which launches fit, what goes the other way."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from innerloop.contract.errors import InnerloopError
from innerloop.kernels import compile, skinny
from innerloop.kernels.launch import Limits, candidates
from innerloop.kernels.skinny import arguments, cost, cross, reference
from innerloop.kernels.skinny.packing import pack
from innerloop.kernels.skinny.start import SOURCE

H200 = Limits("Hopper", 90, 132, 232448, 60 << 20)
GEFORCE = Limits("Blackwell", 120, 170, 101376, 96 << 20)
# batch entries times heads, head width, width, tokens, keys: starVLA's QwenPI_v3 and odd ones
SHAPES = [
    (16, 64, 1024, 16, 320),
    (16, 64, 1024, 1, 1),
    (16, 64, 1024, 17, 200),
    (16, 64, 1024, 32, 320),
    (32, 64, 1024, 16, 192),
    (12, 64, 768, 16, 182),
    (32, 48, 1536, 30, 169),
    (8, 128, 1024, 9, 100),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("modulated", [False, True])
def test_it_means_norm_product_and_attention(packed: bool, modulated: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 64) + 0.5, torch.randn(64, 64) / 8, torch.randn(64)
    k, v = torch.randn(2, 9, 2, 4, 16).unbind(2)
    mod = tuple(torch.randn(2, 64)) if modulated else (None, None)
    valid = torch.ones(2, 9, dtype=torch.int32)
    valid[0, 3:6] = 0
    for mask in (valid, None):
        taken = pack(weight) if packed else weight
        out = skinny.norm_attend(x, *mod, 1e-5, taken, bias, k, v, mask, 4)
        q = F.linear(F.layer_norm(x, (64,), *mod, eps=1e-5), weight, bias).view(2, 5, 4, 16)
        seen = None if mask is None else mask.bool()[:, None, None]
        expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen)
        torch.testing.assert_close(out, expected.transpose(1, 2).reshape(2, 5, 64), atol=1e-5, rtol=1e-5)
        q = reference.norm_linear(x, *mod, 1e-5, taken, bias, False)
        alone = reference.attention(q.view(2, 5, 4, 16), k, v, mask, 0.25)
        assert torch.equal(out, alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_size_has_a_launch_that_fits(shape: tuple[int, ...]) -> None:
    groups, dim, width, tokens, keys = shape
    able = candidates(cross.NORM_ATTEND, shape, H200)
    for launch in able:
        split = launch["SPLIT"]
        assert cross._bytes(launch, shape) <= H200.shared_bytes
        assert groups * split <= H200.multiprocessors
        assert width % (32 * split * launch.warps) == 0
        assert split > 1  # a launch of one program a head has no cluster, which the source needs
        assert dim // split % 8 == 0
        kept = dim * width // split * 2 + keys * (dim + dim // split) * 2  # weights, keys and values alone
        assert cross._bytes(launch, shape) > kept
    assert tokens > 16 or dim > 64 or able[0]["RESIDENT"] == 3


def test_the_first_launch_is_four_programs_a_head() -> None:
    for keys in (192, 320):
        first = candidates(cross.NORM_ATTEND, (16, 64, 1024, 16, keys), H200)[0]
        assert (first.warps, first["SPLIT"], first["RESIDENT"]) == (8, 4, 3)


def _fits(
    tokens: int = 16, keys: int = 320, heads: int = 16, dim: int = 64, kv_heads: int = 16, pair: int = 8, batch: int = 1
) -> bool:
    x = torch.empty(batch, tokens, 1024, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, keys, kv_heads, dim, dtype=torch.bfloat16, device="meta")
    weight = skinny.Packed(torch.empty(0), heads * dim, 1024, pair)
    return cross.fits(x, weight, k, heads)


def test_which_sizes_take_the_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _fits()  # no device of this kind here
    monkeypatch.setattr(cross, "limits", lambda device: H200)
    assert _fits()
    assert _fits(tokens=32, keys=512)
    assert _fits(batch=2)
    assert not _fits(batch=4)  # measured: slower than the two kernels
    assert not _fits(tokens=33)
    assert not _fits(keys=1500)
    assert not _fits(kv_heads=4)
    assert not _fits(dim=40)
    assert not _fits(pair=32)
    assert not _fits(batch=32, tokens=2)
    monkeypatch.setattr(cross, "limits", lambda device: GEFORCE)
    assert _fits(keys=128)
    assert not _fits(keys=600)


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, k = torch.zeros(1, 33, 64, dtype=torch.bfloat16), torch.zeros(1, 9, 4, 16, dtype=torch.bfloat16)
    weight = pack(torch.zeros(64, 64, dtype=torch.bfloat16))
    with pytest.raises(InnerloopError, match="not 33 of 64"):
        cross.norm_attend(x, None, None, 1e-5, weight, torch.zeros(64, dtype=torch.bfloat16), k, k, None, 4)


def test_arguments_have_the_size_that_the_source_lays_out() -> None:
    assert ctypes.sizeof(arguments.NormAttendArgs) == 9 * 8 + 2 * 8 + 5 * 4 + 4


def test_cost_is_that_of_its_parts_without_the_query_between() -> None:
    whole = cost.norm_attend(16, 182, 1024, 16, 64)
    query, mixed = cost.norm_linear(16, 1024, 1024), cost.attend(16, 182, 16, 16, 64)
    assert whole.flops == query.flops + mixed.flops
    assert whole.bytes == query.bytes + mixed.bytes - 2 * 2 * 16 * 1024


@pytest.mark.skipif(not compile.available(), reason="needs NVRTC")
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_source_compiles_for_every_architecture(
    capability: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    common = {"MODULATION_FLOAT": 1, "RESIDENT": 1}
    few = {"K": 1024, "DIM": 64, "STEPS": 3, "SPLIT": 4, "WARPS": 8, "MT": 1}
    for defines in (
        few,
        {**few, "WARPS": 4, "MT": 2, "MODULATION_FLOAT": 0},
        {**few, "DIM": 48, "K": 1536, "SPLIT": 2},
    ):
        assert (
            compile.machine_code(SOURCE / "norm_attend.cu", {**common, **defines}, f"sm_{capability}")[:4] == b"\x7fELF"
        )
