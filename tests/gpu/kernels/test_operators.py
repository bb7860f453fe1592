"""Every Triton op on a CUDA device: fp32 truth, capture, device-side lengths and sizes, dependent launch."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.case import Case, earned
from bench.cases import cases
from innerloop.kernels import activation, launch, linear, norm, rope, use_kernels
from innerloop.kernels.attention import attention
from innerloop.kernels.attention import reference as attention_reference
from innerloop.kernels.image import frames_to_patches
from innerloop.kernels.image import reference as image_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ALL = {f"{c.op}: {c.label}": c for c in cases()}
# Products that a kernel of ours may make.
OURS = (
    "siglip patches",
    "dit state + relu",
    "siglip fc2, add rms",
    "vit out, add rms",
    "36 projections",
    "36 K and V",
    "4 mergers + gelu",
)
TRITON = {name: c for name, c in ALL.items() if c.op != "linear" or c.label in OURS}
CHAINED = {name: c for name, c in TRITON.items() if c.op != "timestep"}  # time embeddings are made once, at load


@pytest.fixture
def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_against_fp32(case: Case, device: torch.device) -> None:
    case.check(device)


@pytest.mark.parametrize("case", TRITON.values(), ids=TRITON)
def test_every_candidate_launches_and_agrees(case: Case, device: torch.device) -> None:
    inputs = case.make(device)
    with launch.recorded() as used:
        case.outputs(case.triton(), inputs)
    for key, table in used.items():
        for choice in launch.candidates(table, key[1], launch.limits(device)):
            with launch.forced({key: choice}):
                case.check(device)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_replays_give_the_same_bits(case: Case, device: torch.device) -> None:
    inputs = case.make(device)
    expected = case.outputs(case.triton(), inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.outputs(case.triton(), inputs)
    for _ in range(2):
        graph.replay()
        for want, got in zip(expected, captured, strict=True):
            assert torch.equal(want, got)


def test_one_capture_serves_every_length(device: torch.device) -> None:
    capacity = 150
    for tokens in (10, 150):
        q = torch.randn(1, tokens, 8, 256, device=device).bfloat16()
        k, v = (torch.randn(1, capacity, 1, 256, device=device).bfloat16() for _ in range(2))
        mask = torch.ones(1, capacity, dtype=torch.int32, device=device)
        attention(q, k, v, mask, 1 / 16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, mask, 1 / 16)
        for length in range(1, capacity + 1):
            mask.zero_()[:, :length] = 1
            graph.replay()
            same = attention_reference.attention(q, k, v, mask, 1 / 16)
            truth = attention_reference.attention(q.float(), k.float(), v.float(), mask, 1 / 16)
            earned(f"{tokens} queries over {length}", out, same, truth)


def test_one_capture_serves_every_frame_size(device: torch.device) -> None:
    frames = torch.randint(0, 256, (1, 2, 1920 * 1080 * 3), dtype=torch.uint8, device=device)
    sizes = torch.tensor([[[480, 640], [1, 1]]], dtype=torch.int32, device=device)
    frames_to_patches(frames, sizes, 224, 14, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = frames_to_patches(frames, sizes, 224, 14, torch.float32)
    for height, width in ((480, 640), (1080, 1920), (224, 224), (1, 1), (33, 500), (719, 405)):
        sizes[0, 0] = torch.tensor([height, width], dtype=torch.int32)
        graph.replay()
        expected = image_reference.frames_to_patches(frames, sizes, 224, 14, torch.float32)
        assert (out - expected).abs().max() <= 1e-6


def test_choices_of_kernels_agree(device: torch.device) -> None:
    case = next(c for c in cases("norm") if c.function == "gated_add_rms_norm")
    inputs = case.make(device)
    public = __import__("innerloop.kernels.norm", fromlist=["norm"])
    truth = case.outputs(case.reference(), tuple(i.float() if torch.is_tensor(i) else i for i in inputs))
    for kind in ("reference", "operators", "fused"):
        with use_kernels(kind):
            for got, want in zip(case.outputs(public, inputs), truth, strict=True):
                assert (got.float() - want).abs().max() <= 0.1
                assert torch.nn.functional.cosine_similarity(got.float().flatten(), want.flatten(), dim=0) > 0.99999


@triton.jit  # type: ignore[untyped-decorator]
def _late_copy(source_ptr, target_ptr, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets its successor start, sleeps, and only then writes."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + at, mask=at < words, other=0)
    value = tl.inline_asm_elementwise(
        "nanosleep.u32 400000; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(target_ptr + at, value, mask=at < words)


@pytest.mark.parametrize("case", CHAINED.values(), ids=CHAINED)
def test_a_late_producer_is_waited_for(case: Case, device: torch.device) -> None:
    if torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("dependent launch needs compute capability 9.0")
    inputs = case.make(device)
    expected = case.outputs(case.triton(), inputs)
    source = inputs[0].contiguous().view(-1).view(torch.int32)
    late = torch.zeros_like(source)
    given = (late.view(inputs[0].dtype).view(inputs[0].shape), *inputs[1:])
    with launch.dependent_launch():
        case.call(case.triton(), given)
        for _ in range(3):
            late.zero_()
            torch.cuda.synchronize()
            _late_copy[(triton.cdiv(source.numel(), 1024),)](source, late, source.numel(), BLOCK=1024, num_warps=4)
            # Nothing may be launched between the two: a plain kernel would wait in the place of the one under test.
            result = case.call(case.triton(), given)
            results = [*result] if isinstance(result, tuple) else [result]
            for want, have in zip(expected, [*results, *(given[n] for n in case.written)], strict=True):
                assert torch.equal(want, have)


def test_every_kernel_of_a_late_chain_waits(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("dependent launch needs compute capability 9.0")
    tokens, width, heads = 320, 512, 2

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    qkv, angle = wide(1, tokens, (heads + 2) * 256), torch.rand(1, tokens, 128, device=device)
    valid = (torch.arange(tokens, device=device) < 300).int()[None]
    residual, scale, out = wide(1, tokens, width), wide(width), wide(width, heads * 256) / 16
    up, down = wide(4096, width) / 16, wide(width, 2048) / 32
    cos, sin, source = angle.cos(), angle.sin(), qkv.view(-1).view(torch.int32)
    keys, values = (torch.zeros(1, tokens, 1, 256, dtype=torch.bfloat16, device=device) for _ in range(2))

    def layer(projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = rope.rotate_and_store(projected, cos, sin, heads, 1, keys, values, 0)
        mixed = attention(q, keys, values, valid, 1 / 16)
        x, normed = norm.add_rms_norm(residual, linear.deferred(mixed, out)[0], scale, 1e-6)
        hidden = activation.glu(linear.linear(normed, up), "gelu_tanh")
        return norm.add_rms_norm(x, linear.deferred(hidden, down)[0], scale, 1e-6)

    expected = layer(qkv)
    late = torch.zeros_like(source)
    with launch.dependent_launch():
        layer(late.view(torch.bfloat16).view(qkv.shape))
        for _ in range(3):
            for stale in (late, keys, values):
                stale.zero_()
            torch.cuda.synchronize()
            _late_copy[(triton.cdiv(source.numel(), 1024),)](source, late, source.numel(), BLOCK=1024, num_warps=4)
            for want, have in zip(expected, layer(late.view(torch.bfloat16).view(qkv.shape)), strict=True):
                assert torch.equal(want, have)
