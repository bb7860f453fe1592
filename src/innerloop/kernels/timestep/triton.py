"""Sines and cosines of a time over geometric periods, angles in fp64."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Table

TABLE = Table("timestep", default=[Launch.of(4, BLOCK=256), Launch.of(1, BLOCK=64)])


@triton.jit
def _sincos(t_ptr, frequency_ptr, out_ptr, half, COS_FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < half
    release_successor(PDL)
    wait_for_producer(PDL)
    t = tl.load(t_ptr + row).to(tl.float64)
    angle = t * tl.load(frequency_ptr + column, mask=held, other=0.0)
    sine, cosine = tl.sin(angle).to(tl.float32), tl.cos(angle).to(tl.float32)
    first = out_ptr + row * 2 * half + column
    if COS_FIRST:
        tl.store(first, cosine, mask=held)
        tl.store(first + half, sine, mask=held)
    else:
        tl.store(first, sine, mask=held)
        tl.store(first + half, cosine, mask=held)


def sincos(t: Tensor, dim: int, min_period: float, max_period: float, cos_first: bool = False) -> Tensor:
    """See kernels.timestep."""
    half = dim // 2
    fraction = torch.linspace(0.0, 1.0, half, dtype=torch.float64, device=t.device)
    frequency = (2.0 * math.pi / min_period) * (min_period / max_period) ** fraction
    out = torch.empty((t.shape[0], dim), dtype=torch.float32, device=t.device)
    choice = launch.choose(TABLE, (dim,), t.device)
    grid = (t.shape[0], triton.cdiv(half, choice["BLOCK"]))
    _sincos[grid](t.contiguous(), frequency, out, half, COS_FIRST=cos_first, **launch.options(choice, t.device))
    return out
