"""Gather and scale rows of a table; gather those of text and of pictures."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.device import release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Table

TABLE = Table("embedding", default=[Launch.of(4, BLOCK=1024), Launch.of(2, BLOCK=512), Launch.of(8, BLOCK=2048)])


@triton.jit
def _embed(tokens_ptr, table_ptr, out_ptr, width, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    release_successor(PDL)
    wait_for_producer(PDL)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    values = tl.load(table_ptr + token * width + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (values * scale).to(out_ptr.dtype.element_ty), mask=held)


def embed(tokens: Tensor, table: Tensor, scale: float) -> Tensor:
    """See kernels.embedding."""
    width = table.shape[1]
    out = torch.empty((*tokens.shape, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    choice = launch.choose(TABLE, (width,), table.device)
    grid = (tokens.numel(), triton.cdiv(width, choice["BLOCK"]))
    _embed[grid](tokens.contiguous(), table, out, width, scale, **launch.options(choice, table.device))
    return out


@triton.jit
def _interleave(
    tokens_ptr, table_ptr, rows_ptr, visual_ptr, out_ptr, width, last, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    place, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    release_successor(PDL)
    wait_for_producer(PDL)
    token, row = tl.load(tokens_ptr + place).to(tl.int64), tl.load(rows_ptr + place).to(tl.int64)
    if (row == last) & (layer == 0):
        values = tl.load(table_ptr + token * width + column, mask=held, other=0.0)
    else:
        values = tl.load(visual_ptr + (layer * (last + 1) + row) * width + column, mask=held, other=0.0)
    tl.store(out_ptr + (layer * tl.num_programs(0) + place) * width + column, values, mask=held)


def interleave(tokens: Tensor, table: Tensor, rows: Tensor, visual: Tensor) -> Tensor:
    """See kernels.embedding."""
    layers, held, width = visual.shape
    out = torch.empty((layers, *tokens.shape, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    choice = launch.choose(TABLE, (width,), table.device)
    grid = (tokens.numel(), triton.cdiv(width, choice["BLOCK"]), layers)
    _interleave[grid](
        tokens.contiguous(), table, rows.contiguous(), visual.contiguous(), out, width, held - 1,
        **launch.options(choice, table.device),
    )  # fmt: skip
    return out
