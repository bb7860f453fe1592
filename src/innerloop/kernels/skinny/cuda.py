"""Launches of the CUDA kernels in source/: arguments checked, sizes fixed at compile time."""

from collections.abc import Mapping
from math import ceil, log2

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError
from innerloop.kernels.euler import Guide
from innerloop.kernels.launch import Launch, Limits, Shape, Table, choose, limits
from innerloop.kernels.skinny.arguments import AttendArgs, LinearArgs, StepArgs
from innerloop.kernels.skinny.checks import is_float, modulation, need_bias, need_contiguous, strides
from innerloop.kernels.skinny.packing import WARP_COLUMNS, Packed
from innerloop.kernels.skinny.start import begin

NORM_QKV_ROPE, NORM_GLU, RESIDUAL, NORM_LINEAR = range(4)
MAX_ROWS = 64
ATTENTION_PARTS = 8  # programs that share one head's keys
ATTENTION_DIM = 256


def column_tiles(tokens: int) -> int:
    """8-token tiles of one pass."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


def _passes(tokens: int) -> int:
    return ceil(tokens / (8 * column_tiles(tokens)))


def _linear_bytes(launch: Launch, shape: Shape, prefixed: bool = True) -> int:
    """Shared memory of one program; prefixed: with what an RMS norm keeps for rows that are given."""
    phase, _, k, rows = shape
    nt, passes, split, tiles = column_tiles(rows), _passes(rows), launch["SPLIT"], launch["TILES"]
    items = tiles * nt * 32
    size = tiles * (k // split) * 32 + (split - 1) * passes * items * 16 + 128
    if phase != RESIDUAL:
        centred = phase == NORM_LINEAR
        scales = 2 if prefixed and not centred else 1
        products, sums = 2 if prefixed or centred else 1, 2 if centred else 1
        size += (scales * k + products * tiles * 16 * (launch.warps + 1) + sums * nt * 8 * launch.warps) * 4
    if passes > 1:
        size += launch.warps * tiles * nt * 512
    return size


def _linear_suits(launch: Launch, shape: Shape, limits: Limits) -> bool:
    phase, n, k, _ = shape
    split, tiles = launch["SPLIT"], launch["TILES"]
    if launch.warps * split * WARP_COLUMNS != k or (split > 1 and phase != RESIDUAL) or n // 16 % tiles:
        return False
    if tiles == 1 or phase == RESIDUAL:
        return tiles == 1
    return n // 16 // tiles >= limits.multiprocessors // 2


def _launches() -> list[Launch]:
    """Splits of K over warps of 128 columns and clusters: 8 warps, many tiles and many registers first."""
    return [
        Launch.of(warps, SPLIT=split, TILES=tiles, RESIDENT=resident)
        for warps in sorted(range(1, 17), key=lambda w: abs(w - 8))
        for split in (1, 2, 4)
        for tiles in (4, 2, 1)
        for resident in (1, 0, 2, 3)
    ]


LINEAR = Table("skinny linear", _launches(), {}, _linear_bytes, _linear_suits)


def attention_chunk(keys: int) -> int:
    """Keys of one program: an eighth, in whole tiles of 16."""
    return ceil(keys / ATTENTION_PARTS / 16) * 16


def attention_bytes(tokens: int, keys: int, overlay: bool) -> int:
    """Shared memory of one attention program; overlay: the cluster's sums take the place of the keys."""
    chunk, rows = attention_chunk(keys), ceil(tokens / 8) * 8
    pushed = ATTENTION_PARTS * rows * 32 * 4
    kept = chunk * (576 + 528) + rows * (576 + 2 * 8 * 4 + ATTENTION_PARTS * 8) + chunk
    return kept + (0 if overlay else pushed)


def _overlays(tokens: int, keys: int, shared_bytes: int) -> bool:
    return attention_bytes(tokens, keys, False) > shared_bytes


def can_multiply(x: Tensor, weight: Packed, norm: bool = False) -> bool:
    """Whether the linear kernel takes these rows and this weight; norm: behind a layer norm."""
    rows, own = x.numel() // x.shape[-1], limits(x.device)
    if x.dtype is not torch.bfloat16 or not 1 <= rows <= MAX_ROWS or own.capability < 90:
        return False
    phase = RESIDUAL if weight.pair == 8 else NORM_GLU if weight.pair == weight.rows // 2 else NORM_QKV_ROPE
    if norm:
        phase = NORM_LINEAR
    shape = (phase, weight.rows, weight.columns, rows)
    return any(_linear_suits(c, shape, own) and _linear_bytes(c, shape) <= own.shared_bytes for c in LINEAR.default)


def can_attend(q: Tensor, k: Tensor) -> bool:
    """Whether `attend` takes these: heads of 256, bfloat16, keys and pushed sums within shared memory."""
    _, tokens, _, dim = q.shape
    if dim != ATTENTION_DIM or q.dtype is not torch.bfloat16 or tokens > MAX_ROWS or attention_chunk(k.shape[1]) > 256:
        return False
    own = limits(q.device)
    chunk, rows = attention_chunk(k.shape[1]), ceil(tokens / 8) * 8
    overlay = _overlays(tokens, k.shape[1], own.shared_bytes)
    if overlay and ATTENTION_PARTS * rows * 128 > chunk * 576:
        return False
    return own.capability >= 90 and attention_bytes(tokens, k.shape[1], overlay) <= own.shared_bytes


def can_step(state: Tensor, weight: Tensor) -> bool:
    """Whether the step kernel takes this action width, model width and their weight."""
    actions = state.shape[-1]
    width = weight.numel() // actions
    fits = width * actions * 4 <= limits(state.device).shared_bytes
    return actions <= 32 and width % 64 == 0 and width <= 1024 and fits


def norm_qkv_rope(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Packed,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    prefix: Tensor | None = None,
) -> Tensor:
    """As reference.norm_qkv_rope."""
    batch, tokens, _ = x.shape
    dim = k_cache.shape[-1]
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        need_contiguous(name, tensor)
    if weight.pair != dim // 2 or cos.dtype is not torch.float32 or cos.shape != (batch, tokens, dim // 2):
        raise InnerloopError(
            f"norm_qkv_rope wants a weight packed with pair={dim // 2} (got {weight.pair}) and float32 cos and sin of "
            f"shape {(batch, tokens, dim // 2)} (got {cos.dtype}, {tuple(cos.shape)}); pack and shape them so"
        )
    batch_stride, row_stride = strides("k_cache and v_cache", k_cache, v_cache)
    q = torch.empty(batch, tokens, heads, dim, dtype=x.dtype, device=x.device)
    arguments = LinearArgs(
        **modulation(scale, shift, eps), cos=cos.data_ptr(), sin=sin.data_ptr(), row_tokens=tokens, start=start,
        heads=heads, kv_heads=kv_heads, k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(),
        batch_stride=batch_stride, row_stride=row_stride,
    )  # fmt: skip
    _give(arguments, prefix, tokens, scale=scale, shift=shift)
    _linear(NORM_QKV_ROPE, x, weight, q, arguments, scale)
    return q


def norm_glu(
    x: Tensor, scale: Tensor, shift: Tensor | None, eps: float, weight: Packed, prefix: Tensor | None = None
) -> Tensor:
    """As reference.norm_glu."""
    need_contiguous("x", x)
    if weight.pair != weight.rows // 2:
        raise InnerloopError(
            f"norm_glu wants a weight packed with pair={weight.rows // 2}, its number of gates, not {weight.pair}"
        )
    out = torch.empty(*x.shape[:-1], weight.rows // 2, dtype=x.dtype, device=x.device)
    arguments = LinearArgs(**modulation(scale, shift, eps))
    _give(arguments, prefix, x.shape[1], scale=scale, shift=shift)
    _linear(NORM_GLU, x, weight, out, arguments, scale)
    return out


def norm_linear(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, weight: Packed, bias: Tensor, gelu: bool
) -> Tensor:
    """As reference.norm_linear."""
    need_contiguous("x", x)
    need_bias(bias, weight)
    if weight.pair != 8:
        raise InnerloopError(f"norm_linear wants a weight packed with pair=8, not {weight.pair}")
    out = torch.empty(*x.shape[:-1], weight.rows, dtype=x.dtype, device=x.device)
    arguments = LinearArgs(**modulation(scale, shift, eps), bias=bias.data_ptr())
    _linear(NORM_LINEAR, x, weight, out, arguments, shift if scale is None else scale, {"GELU": int(gelu)})
    return out


def project_residual(
    y: Tensor,
    weight: Packed,
    gate: Tensor | None,
    residual: Tensor,
    bias: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """As reference.project_residual."""
    need_contiguous("y", y)
    need_contiguous("residual", residual)
    if weight.pair != 8:
        raise InnerloopError(f"project_residual wants a weight packed with pair=8, not {weight.pair}")
    out = torch.empty_like(residual)
    arguments = LinearArgs(residual=residual.data_ptr(), gate=None if gate is None else gate.data_ptr())
    if bias is not None:
        need_bias(bias, weight)
        arguments.bias = bias.data_ptr()
    _give(arguments, prefix, y.shape[1], gate=gate)
    _linear(RESIDUAL, y, weight, out, arguments, gate)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    scale: float,
    start: int,
) -> Tensor:
    """As reference.attend."""
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    need_contiguous("q", q)
    if not can_attend(q, k):
        raise InnerloopError(
            f"attend takes bfloat16 heads of width {ATTENTION_DIM} and at most {MAX_ROWS} tokens and 2048 keys within "
            f"shared memory, not {q.dtype}, width {dim}, {tokens} tokens, {keys} keys; use kernels.attention"
        )
    out = torch.empty(batch, tokens, heads * dim, dtype=q.dtype, device=q.device)
    batch_stride, row_stride = strides("k and v", k, v)
    arguments = AttendArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), key_valid=None if key_valid is None else key_valid.data_ptr(),
        out=out.data_ptr(), batch_stride=batch_stride, row_stride=row_stride, tokens=tokens, keys=keys, start=start,
        heads=heads, kv_heads=kv_heads, scale=scale * log2(2.718281828459045),
    )  # fmt: skip
    overlay = _overlays(tokens, keys, limits(q.device).shared_bytes)
    defines = {
        "NT": ceil(tokens / 8),
        "CHUNK": attention_chunk(keys),
        "OVERLAY": int(overlay),
        "RESIDENT": 1,
    }
    size = attention_bytes(tokens, keys, overlay)
    grid = batch * heads * ATTENTION_PARTS
    begin("attend", defines, grid, 256, size, ATTENTION_PARTS, arguments, q.device)
    return out


def project_in(state: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, silu: bool = False) -> Tensor:
    """As reference.project_in; dtype bfloat16."""
    out = torch.empty(*state.shape[:-1], weight.shape[0], dtype=dtype, device=state.device)
    arguments = StepArgs(
        weight_in=weight.data_ptr(), bias_in=bias.data_ptr(), state=state.data_ptr(), out=out.data_ptr(),
    )  # fmt: skip
    _step(state, weight.shape[0], arguments, {"HAS_IN": 1, "SILU": int(silu)})
    return out


def norm_project_step(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    dt: float,
    guide: Guide | None = None,
) -> Tensor:
    """As reference.norm_project_step."""
    need_contiguous("x", x)
    out = torch.empty_like(state)
    arguments = StepArgs(
        **modulation(scale, shift, eps), x=x.data_ptr(), weight_out=weight.data_ptr(), bias_out=bias.data_ptr(),
        state=state.data_ptr(), next_state=out.data_ptr(), dt=dt,
    )  # fmt: skip
    defines = {"HAS_OUT": 1, "MODULATION_FLOAT": is_float(scale)}
    if guide is not None:
        need_contiguous("previous", guide.previous)
        need_contiguous("weight", guide.weight)
        _need_lengths(guide.prefix)
        arguments.previous, arguments.guidance = guide.previous.data_ptr(), guide.weight.data_ptr()
        arguments.prefix, arguments.row_tokens = guide.prefix.data_ptr(), state.shape[1]
        arguments.gain, arguments.time = guide.gain, guide.time
        defines["GUIDED"] = 1
    _step(state, weight.shape[1], arguments, defines)
    return out


def _step(state: Tensor, width: int, arguments: StepArgs, defines: Mapping[str, int]) -> None:
    need_contiguous("state", state)
    actions = state.shape[-1]
    size = width * actions * 4 if "HAS_IN" in defines else 0
    rows = state.numel() // actions
    begin("step", {**defines, "K": width, "A": actions}, rows, 1024, size, 1, arguments, state.device)


def _linear(
    phase: int,
    x: Tensor,
    weight: Packed,
    out: Tensor,
    arguments: LinearArgs,
    table: Tensor | None,
    extra: Mapping[str, int] | None = None,
) -> None:
    rows = x.numel() // x.shape[-1]
    if rows > MAX_ROWS or x.shape[-1] != weight.columns or x.dtype is not torch.bfloat16:
        raise InnerloopError(
            f"skinny kernels take at most {MAX_ROWS} bfloat16 rows of width {weight.columns}, not {rows} of "
            f"{x.shape[-1]} in {x.dtype}; use the dense weight"
        )
    shape = (phase, weight.rows, weight.columns, rows)
    launch = choose(LINEAR, shape, x.device)
    arguments.weight, arguments.x, arguments.out = weight.data.data_ptr(), x.data_ptr(), out.data_ptr()
    arguments.rows, arguments.groups = rows, _passes(rows)
    defines = {
        **dict(launch.sizes), "PHASE": phase, "N": weight.rows, "K": weight.columns, "WARPS": launch.warps,
        "NT": column_tiles(rows), "HALF": weight.pair, "MODULATION_FLOAT": is_float(table),
        "PREFIXED": int(bool(arguments.prefix)),
        **(extra or {}),
    }  # fmt: skip
    grid = weight.rows // 16 // launch["TILES"] * launch["SPLIT"]
    size = _linear_bytes(launch, shape, bool(arguments.prefix))
    begin("linear", defines, grid, launch.warps * 32, size, launch["SPLIT"], arguments, x.device)


def _give(arguments: LinearArgs, prefix: Tensor | None, tokens: int, **tables: Tensor | None) -> None:
    """Where the first prefix[b] of `tokens` rows are given: each table's second row, which they take."""
    if prefix is None:
        return
    _need_lengths(prefix)
    for name, table in tables.items():
        if table is None or table.dim() != 2 or len(table) != 2 or table.stride(1) != 1:
            found = None if table is None else list(table.shape)
            raise InnerloopError(f"with a prefix, {name} must be [2, D] with whole rows, not {found}")
        setattr(arguments, f"clean_{name}", table[1].data_ptr())
    arguments.prefix, arguments.row_tokens = prefix.data_ptr(), tokens


def _need_lengths(prefix: Tensor) -> None:
    if prefix.dtype is not torch.int32 or not prefix.is_contiguous():
        raise InnerloopError(f"the prefix must be contiguous int32, one length a batch entry, not {prefix.dtype}")
