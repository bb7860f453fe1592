"""Every op at shapes that policies run."""

import torch
from torch import Tensor

from bench.between import between
from bench.case import BF16, FP32, INT32, Case, Composed, Inputs, Pair, random
from innerloop.kernels.activation import cost as activation_cost
from innerloop.kernels.attention import cost as attention_cost
from innerloop.kernels.embedding import cost as embedding_cost
from innerloop.kernels.euler import cost as euler_cost
from innerloop.kernels.image import cost as image_cost
from innerloop.kernels.linear import cost as linear_cost
from innerloop.kernels.norm import cost as norm_cost
from innerloop.kernels.rope import cost as rope_cost
from innerloop.kernels.timestep import cost as timestep_cost

BIASED = ("siglip", "dit", "vit out")  # labels of products


def _norms() -> list[Case]:
    def plain(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 1, rows, width), random(d, width), 1e-6, True

        return Case("norm", "rms_norm", f"rms {rows}x{width}", norm_cost.norm(rows, width), make)

    def layer(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 2, rows // 2, width), random(d, width), random(d, width), 1e-6

        return Case("norm", "layer_norm", f"layer {rows}x{width}", norm_cost.norm(rows, width, operands=2), make)

    def layers(count: int, rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:  # the entries of the first are the op's inputs
            return random(d, count, rows, width), random(d, count, width), random(d, count, width), 1e-5

        cost = norm_cost.norm(count * rows, width, operands=2)
        return Case("norm", "layer_norms", f"{count} layers {rows}x{width}", cost, make)

    def add_rms(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 1, rows, width), random(d, 1, rows, width), random(d, width), 1e-6, True

        return Case("norm", "add_rms_norm", f"add rms {rows}x{width}", norm_cost.norm(rows, width, added=True), make)

    def add_layer(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            wide = (random(d, 2, rows // 2, width) for _ in range(2))
            return *wide, random(d, width), random(d, width), 1e-6

        cost = norm_cost.norm(rows, width, added=True, operands=2)
        return Case("norm", "add_layer_norm", f"add layer {rows}x{width}", cost, make)

    def gated(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            wide = (random(d, 1, rows, width) for _ in range(2))
            return *wide, *(random(d, width, dtype=FP32) for _ in range(3)), 1e-6

        cost = norm_cost.norm(rows, width, added=True, operands=3)
        return Case("norm", "gated_add_rms_norm", f"gated adaRMS {rows}x{width}", cost, make)

    def modulated(rows: int, width: int) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 2, rows // 2, width), *(random(d, 2, 1, width) for _ in range(2)), 1e-5

        cost = norm_cost.norm(rows, width, operands=2)
        return Case("norm", "modulated_layer_norm", f"adaLN {rows}x{width}", cost, make)

    return [
        plain(576, 2048), add_rms(576, 2048), add_rms(712, 2048), gated(10, 1024), gated(50, 1024),
        layer(512, 1152), add_layer(512, 1152), modulated(82, 1536), layers(36, 192, 2560),
    ]  # fmt: skip


def _ropes() -> list[Case]:
    def case(label: str, tokens: int, heads: tuple[int, int, int], start: int, normed: bool = False) -> Case:
        q, kv, dim = heads

        def make(d: torch.device) -> Inputs:
            angles = torch.rand(1, tokens, dim // 2, device=d) * 6.0
            caches = (torch.zeros(1, start + tokens + 10, kv, dim, dtype=BF16, device=d) for _ in range(2))
            weights = (random(d, dim), random(d, dim)) if normed else (None, None)
            qkv = random(d, 1, tokens, (q + 2 * kv) * dim)
            return qkv, angles.cos(), angles.sin(), q, kv, *caches, start, *weights

        cost = rope_cost.rotate_and_store(tokens, q, kv, dim, normed=normed)
        return Case("rope", "rotate_and_store", label, cost, make, written=(5, 6))

    return [
        case("gemma 576", 576, (8, 1, 256), 0),
        case("expert 10", 10, (8, 1, 256), 712),
        case("qwen3 4B 182, q/k norm", 182, (32, 8, 128), 0, normed=True),
    ]


def _attentions() -> list[Case]:
    def vit(images: int, tokens: int, heads: int, dim: int) -> Case:
        def make(d: torch.device) -> Inputs:
            qkv = random(d, images, tokens, 3, heads, dim)
            return *qkv.unbind(2), None, dim**-0.5

        cost = attention_cost.attention(tokens, tokens, heads, heads, dim, batch=images)
        return Case("attention", "attention", f"vit {images}x{tokens}, {heads} heads of {dim}", cost, make)

    def cached(label: str, tokens: int, valid: list[tuple[int, int]], keys: int) -> Case:
        def make(d: torch.device) -> Inputs:
            mask = torch.zeros(1, keys, dtype=INT32, device=d)
            for first, end in valid:
                mask[:, first:end] = 1
            kv = [random(d, 1, keys, 1, 256) for _ in range(2)]
            return random(d, 1, tokens, 8, 256), *kv, mask, 256**-0.5

        count = sum(end - first for first, end in valid)
        return Case("attention", "attention", label, attention_cost.attention(tokens, count, 8, 1, 256), make)

    def head(tokens: int, keys: int, heads: int, dim: int) -> Case:
        def make(d: torch.device) -> Inputs:
            memory = random(d, 1, keys, 2, heads, dim)
            mask = (torch.arange(keys, device=d) < keys - 10).int()[None]
            return random(d, 1, tokens, heads, dim), *memory.unbind(2), mask, dim**-0.5

        cost = attention_cost.attention(tokens, keys - 10, heads, heads, dim)
        return Case("attention", "attention", f"dit {tokens} of {keys}, {heads} heads of {dim}", cost, make)

    def causal(tokens: int, heads: int, kv: int, dim: int) -> Case:
        def make(d: torch.device) -> Inputs:
            rows = (random(d, 1, tokens, n, dim) for n in (heads, kv, kv))
            return *rows, None, dim**-0.5, True

        cost = attention_cost.attention(tokens, tokens, heads, kv, dim)
        return Case("attention", "attention", f"causal {tokens}, {heads}/{kv} heads of {dim}", cost, make)

    return [
        vit(2, 256, 16, 72),
        vit(2, 256, 16, 64),
        cached("prefix 576, 560 valid", 576, [(0, 560)], 576),
        cached("prefix 712, all valid", 712, [(0, 712)], 712),
        cached("prefix 712, 48 of 200 prompt", 712, [(0, 560)], 712),
        cached("query 10 of 586", 10, [(0, 560), (576, 586)], 586),
        cached("query 10 of 722", 10, [(0, 712), (712, 722)], 722),
        cached("query 51 of 611", 51, [(0, 611)], 611),
        causal(182, 32, 8, 128),
        head(16, 192, 16, 64),
        head(41, 169, 32, 48),
    ]


def _rotary_attentions() -> list[Case]:
    """Each as two ops and as one."""

    def two_ways(images: int, tokens: int, heads: int, dim: int) -> list[Case]:
        def make(d: torch.device) -> Inputs:
            angles = torch.rand(images, tokens, dim // 2, device=d) * 6.0
            mask = torch.ones(images, tokens, dtype=INT32, device=d)
            return random(d, images, tokens, 3 * heads * dim), angles.cos(), angles.sin(), heads, mask, dim**-0.5

        label = f"vit {images}x{tokens}, {heads} heads of {dim}"
        cost = attention_cost.rotary_attention(tokens, heads, dim, batch=images)
        return [
            Composed("attention", "attention", f"rotary, then {label}", cost, make),
            Case("attention", "rotary_attention", f"rotary {label}", cost, make),
        ]

    return [*two_ways(1, 196, 16, 64), *two_ways(2, 256, 16, 64)]


def _rest() -> list[Case]:
    def glu(rows: int, width: int, kind: str) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 1, rows, 2 * width), kind

        return Case("activation", "glu", f"{kind} glu {rows}x{width}", activation_cost.glu(rows, width), make)

    def activate(rows: int, width: int, kind: str) -> Case:
        def make(d: torch.device) -> Inputs:
            return random(d, 1, rows, width), kind

        return Case("activation", "activate", f"{kind} {rows}x{width}", activation_cost.activate(rows, width), make)

    def linear(label: str, rows: int, columns: int, inner: int, epilogue: str | None) -> Case:
        bias = label.startswith(BIASED)

        def make(d: torch.device) -> Inputs:
            weight = random(d, columns, inner) * inner**-0.5
            return random(d, 1, rows, inner), weight, random(d, columns) if bias else None, epilogue

        cost = linear_cost.linear(rows, columns, inner, bias=bias)
        return Case("linear", "linear", label, cost, make)

    def pair(label: str, rows: int, columns: int, inner: int) -> Case:
        bias = label.startswith(BIASED)

        def make(d: torch.device) -> Inputs:
            weight = random(d, columns, inner) * inner**-0.5
            wide = random(d, 1, rows, inner), weight, random(d, columns) if bias else None
            return *wide, random(d, 1, rows, columns), random(d, columns)

        cost = linear_cost.linear(rows, columns, inner, bias=bias) + norm_cost.norm(rows, columns, added=True)
        return Pair("linear", "deferred", f"{label}, add rms", cost, make)

    def batched(label: str, layers: int, rows: int, columns: int, inner: int) -> Case:
        def make(d: torch.device) -> Inputs:
            weight = random(d, layers * columns, inner) * inner**-0.5
            return random(d, layers, rows, inner), weight, random(d, layers * columns)

        return Case("linear", "batched", label, linear_cost.batched(layers, rows, columns, inner), make)

    def image(height: int, width: int, dtype: torch.dtype) -> Case:
        def make(d: torch.device) -> Inputs:
            frames = torch.randint(0, 256, (1, 2, 1920 * 1080 * 3), dtype=torch.uint8, device=d)
            return frames, torch.tensor([[[height, width]] * 2], dtype=INT32, device=d), 224, 14, dtype

        cost = image_cost.frames_to_patches(2, height, width, 224, dtype.itemsize)
        return Case("image", "frames_to_patches", f"2x{height}x{width} {str(dtype)[6:]}", cost, make)

    def embed(d: torch.device) -> Inputs:
        tokens = torch.randint(0, 4096, (1, 200), dtype=INT32, device=d)
        return tokens, random(d, 4096, 2048), 45.25

    def sincos(d: torch.device) -> Inputs:
        return torch.linspace(1.0, 0.1, 10, device=d), 1024, 4e-3, 4.0

    def euler(rows: int) -> Case:
        def make(d: torch.device) -> Inputs:
            x = random(d, 1, rows, 32, dtype=FP32)
            return random(d, 1, rows, 1024), random(d, 32, 1024) / 32, random(d, 32), x, -0.1

        cost = euler_cost.project_and_step(rows, 32, 1024)
        return Case("euler", "project_and_step", f"{rows}x1024 to 32", cost, make)

    return [
        glu(576, 16384, "gelu_tanh"), glu(712, 16384, "gelu_tanh"), glu(182, 9728, "silu"),
        activate(512, 4304, "gelu_tanh"), activate(512, 4096, "gelu"), activate(50, 1024, "silu"),
        linear("siglip qkv", 512, 3456, 1152, None), linear("siglip fc1 + gelu", 512, 4304, 1152, "gelu_tanh"),
        linear("siglip fc2", 512, 1152, 4304, None), linear("gemma qkv", 576, 2560, 2048, None),
        linear("gemma gate-up", 576, 32768, 2048, None), linear("gemma down", 576, 2048, 16384, None),
        linear("siglip patches", 512, 1152, 588, None), pair("siglip o", 512, 1152, 1152),
        pair("siglip fc2", 512, 1152, 4304), pair("gemma o", 576, 2048, 2048), pair("gemma down", 576, 2048, 16384),
        linear("qwen3 4B qkv", 192, 6144, 2560, None), linear("qwen3 4B gate-up", 192, 19456, 2560, None),
        pair("qwen3 4B o", 192, 2560, 4096), pair("qwen3 4B down", 192, 2560, 9728),
        linear("vit qkv", 196, 3072, 1024, None), pair("vit out", 196, 1024, 1024), pair("vit fc2", 196, 1024, 4096),
        linear("dit q", 41, 1536, 1536, None), linear("dit qkv", 41, 4608, 1536, None),
        linear("dit up + gelu", 41, 6144, 1536, "gelu_tanh"), pair("dit out", 41, 1536, 1536),
        linear("dit decoder + relu", 40, 1024, 1024, "relu"), linear("dit state + relu", 1, 1024, 132, "relu"),
        pair("dit down", 41, 1536, 6144),
        batched("36 projections", 36, 192, 1024, 2560), batched("36 K and V", 36, 192, 2048, 1024),
        image(224, 224, BF16), image(480, 640, BF16), image(1080, 1920, FP32),
        Case("embedding", "embed", "200x2048", embedding_cost.embed(200, 2048), embed),
        Case("timestep", "sincos", "10x1024", timestep_cost.sincos(10, 1024), sincos),
        euler(10), euler(50),
    ]  # fmt: skip


def _given(rows: int) -> list[Case]:
    """Ops that take a previous chunk: 3 of the first robot's rows are given, none of the second's."""
    each, width, actions = rows // 2, 1024, 32

    def prefix(d: torch.device) -> Tensor:
        return torch.tensor([[3], [0]], dtype=INT32, device=d)

    def table(d: torch.device) -> Tensor:
        return random(d, 4, width, dtype=FP32)[::3]

    def modulated(d: torch.device) -> Inputs:
        return random(d, 2, each, width), table(d), table(d), 1e-6, prefix(d)

    def gated(d: torch.device) -> Inputs:
        return random(d, 2, each, width), random(d, 2, each, width), table(d), prefix(d)

    def activate(d: torch.device) -> Inputs:
        return random(d, 2, each, width, dtype=FP32), "silu", table(d), prefix(d)

    def states(d: torch.device, count: int) -> list[Tensor]:
        return [random(d, 2, each, actions, dtype=FP32) for _ in range(count)]

    def guide(d: torch.device) -> Inputs:
        return *states(d, 3), torch.rand(2, each, device=d), prefix(d), 4.25, 0.8, -0.1

    def impose(d: torch.device) -> Inputs:
        return *states(d, 2), prefix(d)

    size = f"{rows}x{width}, 3 given"
    normed = norm_cost.norm(rows, width, operands=2)
    return [
        Case("norm", "modulated_rms_norm", f"adaRMS {size}", normed, modulated),
        Case("norm", "gated_add", f"gated add {size}", norm_cost.gated_add(rows, width), gated),
        Case("activation", "activate", f"silu {size}", activation_cost.activate(rows, width, 4), activate),
        Case("euler", "guide", f"guide {rows}x{actions}", euler_cost.guide(rows, actions), guide),
        Case("euler", "impose", f"impose {rows}x{actions}", euler_cost.impose(rows, actions), impose),
    ]


def cases(*ops: str) -> list[Case]:
    """All cases, or those of the named ops."""
    every = [*_norms(), *_ropes(), *_attentions(), *_rotary_attentions(), *_rest(), *_given(20), *between()]
    return [c for c in every if not ops or c.op in ops]
