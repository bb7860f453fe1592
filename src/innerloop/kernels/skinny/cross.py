"""Launch of source/norm_attend.cu: a cross-attention's layer norm, query product and attention in one kernel."""

from math import ceil, log2

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError
from innerloop.kernels.launch import Launch, Limits, Shape, Table, choose, limits
from innerloop.kernels.skinny.arguments import NormAttendArgs
from innerloop.kernels.skinny.checks import is_float, modulation, need_bias, need_contiguous, strides
from innerloop.kernels.skinny.packing import Packed
from innerloop.kernels.skinny.start import begin

MAX_TOKENS = 32  # of one entry
STEP = 32  # keys that a warp scores at once
WIDEST_HEAD = 128


def token_tiles(tokens: int) -> int:
    """16-token tiles."""
    return ceil(tokens / 16)


def key_steps(keys: int) -> int:
    """Steps of 32 keys."""
    return ceil(keys / STEP)


def _row(features: int) -> int:
    """Bytes between rows of that many features in shared memory."""
    return (features // 8 | 1) * 16


def _bytes(launch: Launch, shape: Shape) -> int:
    """Shared memory of one program, as the source lays it out."""
    _, dim, width, tokens, keys = shape
    split, tiles, steps = launch["SPLIT"], token_tiles(tokens), key_steps(keys)
    rows = steps * STEP * (_row(dim) + _row(dim // split))
    gathered = split * (tiles * dim * 64 + dim * 8 + tiles * 128)
    own = launch.warps * tiles * 128 + dim * max(tiles * 32, launch.warps * 8)
    return dim * (width // split) * 2 + rows + gathered + own + (dim // 16 + 2) * 8 + steps * 4


def _suits(launch: Launch, shape: Shape, limits: Limits) -> bool:
    """At least a block of columns a warp and 16-token tile; so few heads that four programs each have a multiprocessor.

    Beyond that query and attention apart are faster: 33.5 us a layer against 35.3 for four robots of 16 heads.
    """
    groups, dim, width, tokens, _ = shape
    split, tiles = launch["SPLIT"], token_tiles(tokens)
    blocks, rest = divmod(width, 32 * split * launch.warps)
    if rest or not tiles <= blocks <= 8 or dim % (8 * split) or launch.warps % tiles:
        return False
    spills = launch["RESIDENT"] > 1 and (tiles > 1 or dim > 64)
    return groups * max(split, 4) <= limits.multiprocessors and not spills


# Four programs a head find room beside those of the kernel before, in shared memory and, with at most 80 registers a thread,
# in registers; more of them copy the keys more often. Never one: sums reach even their own program as `st.async` does, which
# is an illegal instruction where a kernel is launched without clusters.
NORM_ATTEND = Table(
    "skinny norm_attend",
    [
        Launch.of(warps, SPLIT=split, RESIDENT=resident)
        for split in (4, 2, 8)
        for warps in (8, 4, 6, 12, 3, 2)
        for resident in (3, 1, 0)
    ],
    {},
    _bytes,
    _suits,
)


def fits(x: Tensor, weight: Packed, k: Tensor, heads: int) -> bool:
    """Whether the kernel takes these sizes: bfloat16, 1 to 32 tokens an entry, as many K/V heads, keys in shared memory."""
    batch, tokens, width = x.shape
    keys, kv_heads, dim = k.shape[1:]
    own = limits(x.device)
    if x.dtype is not torch.bfloat16 or not 1 <= tokens <= MAX_TOKENS or own.capability < 90 or keys < 1:
        return False
    if kv_heads != heads or weight.pair != 8 or dim % 16 or dim > WIDEST_HEAD or weight.rows != heads * dim:
        return False
    shape = (batch * heads, dim, width, tokens, keys)
    return any(_suits(c, shape, own) and _bytes(c, shape) <= own.shared_bytes for c in NORM_ATTEND.default)


def norm_attend(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight: Packed,
    bias: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    heads: int,
) -> Tensor:
    """As reference.norm_attend."""
    batch, tokens, width = x.shape
    keys, dim = k.shape[1], k.shape[3]
    need_contiguous("x", x)
    need_bias(bias, weight)
    if not fits(x, weight, k, heads) or width != weight.columns:
        raise InnerloopError(
            f"norm_attend takes 1 to {MAX_TOKENS} bfloat16 tokens of width {weight.columns} and {heads} heads' keys "
            f"within shared memory, not {tokens} of {width} in {x.dtype} and keys {list(k.shape)}; use norm_linear"
        )
    if key_valid is not None:
        need_contiguous("key_valid", key_valid)
    batch_stride, row_stride = strides("k and v", k, v)
    shape = (batch * heads, dim, width, tokens, keys)
    launch = choose(NORM_ATTEND, shape, x.device)
    out = torch.empty(batch, tokens, heads * dim, dtype=x.dtype, device=x.device)
    arguments = NormAttendArgs(
        **modulation(scale, shift, eps),
        weight=weight.data.data_ptr(), x=x.data_ptr(), bias=bias.data_ptr(), k=k.data_ptr(), v=v.data_ptr(),
        key_valid=None if key_valid is None else key_valid.data_ptr(), out=out.data_ptr(),
        batch_stride=batch_stride, row_stride=row_stride, tokens=tokens, keys=keys, heads=heads,
        score_scale=dim**-0.5 * log2(2.718281828459045),
    )  # fmt: skip
    defines = {
        **dict(launch.sizes), "WARPS": launch.warps, "K": width, "DIM": dim, "STEPS": key_steps(keys),
        "MT": token_tiles(tokens), "MODULATION_FLOAT": is_float(shift if scale is None else scale),
    }  # fmt: skip
    grid = batch * heads * launch["SPLIT"]
    size = _bytes(launch, shape)
    begin("norm_attend", defines, grid, launch.warps * 32, size, launch["SPLIT"], arguments, x.device)
    return out
