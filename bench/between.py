"""Ops before, between and behind the towers of GR00T and starVLA, at their published sizes."""

import torch

from bench.case import BF16, FP32, INT32, Case, Inputs, random
from innerloop.kernels.embedding import cost as embedding_cost
from innerloop.kernels.euler import cost as euler_cost
from innerloop.kernels.image import cost as image_cost
from innerloop.kernels.linear import cost as linear_cost
from innerloop.kernels.norm import cost as norm_cost


def between() -> list[Case]:
    """Planes of patches, text among visual tokens, mergers, and both ends of a DiT's step."""
    return [_planes(2, 256), _interleave(169, 128, 2048), *_mergers(128), *_step(40, 132, 1536), *_step(16, 7, 768)]


def _planes(images: int, patches: int) -> Case:
    def make(d: torch.device) -> Inputs:
        return torch.randint(0, 256, (images, patches, 768), dtype=torch.uint8, device=d), 2, BF16

    cost = image_cost.planes(images * patches, 768, 2)
    return Case("image", "planes", f"planes of {images}x{patches} patches", cost, make)


def _interleave(tokens: int, visual: int, width: int) -> Case:
    def make(d: torch.device) -> Inputs:
        rows = torch.arange(tokens, dtype=INT32, device=d)[None].clamp(max=visual)
        text = torch.randint(0, 4096, (1, tokens), dtype=INT32, device=d)
        return text, random(d, 4096, width), rows, random(d, 4, visual + 1, width)

    cost = embedding_cost.interleave(4, tokens, width)
    return Case("embedding", "interleave", f"4x{tokens}x{width}", cost, make)


def _mergers(rows: int) -> list[Case]:
    wide, out = 4096, 2048

    def norms(d: torch.device) -> Inputs:  # the entries of the first are the op's inputs
        return random(d, 4, rows, wide), random(d, 3, wide), random(d, 3, wide), 1e-6, 1

    def up(d: torch.device) -> Inputs:
        weight = random(d, 4 * out, wide) * wide**-0.5
        return random(d, 4, rows, wide), weight, random(d, 4 * out), None, "gelu"

    return [
        Case("norm", "layer_norms", f"4x{rows}x{wide}, 1 plain", norm_cost.norm(4 * rows, wide, operands=6), norms),
        Case("linear", "batched", "4 mergers + gelu", linear_cost.batched(4, rows, out, wide), up),
    ]


def _step(chunk: int, actions: int, width: int) -> list[Case]:
    def into(d: torch.device) -> Inputs:
        weight = random(d, width, actions, dtype=FP32) * actions**-0.5
        return random(d, 1, chunk, actions, dtype=FP32), weight, random(d, width, dtype=FP32), BF16, "silu"

    def first_norm(d: torch.device) -> Inputs:
        table = random(d, 2, width, dtype=FP32)
        return random(d, 1, chunk + 1, width), random(d, 3, 1, chunk, width), *table, 1e-5, random(d, width), 1

    def out(d: torch.device) -> Inputs:
        weight, bias = random(d, actions, 1024, dtype=FP32) / 32, random(d, actions, dtype=FP32)
        hold = torch.arange(chunk, device=d)[None] / chunk
        return random(d, 1, chunk, 1024), weight, bias, random(d, 1, chunk, actions, dtype=FP32), 0.25, hold

    size = f"{chunk}x{actions}"
    entry = euler_cost.project_in(chunk, actions, width)
    norm = norm_cost.norm(chunk + 1, width, added=True, operands=2)
    step = euler_cost.project_and_step(chunk, actions, 1024)

    def exact(d: torch.device) -> Inputs:
        return *into(d)[:3], FP32, None

    return [
        Case("euler", "project_in", f"{size} to {width} + silu", entry, into),
        Case("euler", "project_in", f"{size} to {width} fp32", euler_cost.project_in(chunk, actions, width, 4), exact),
        Case("norm", "add_layer_norm", f"behind 1 of {chunk + 1}x{width}", norm, first_norm),
        Case("euler", "project_and_step", f"1024 to {size}, held", step, out),
    ]
