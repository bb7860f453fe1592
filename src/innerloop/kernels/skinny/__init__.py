"""Few-row linears (1 to 64 rows) with fused prologue and epilogue, for an action expert that re-reads its weights each step.

On a GPU with bulk copies (compute capability 9.0 and up) weights are packed once, and inside `chain()` each kernel
loads its weights while its predecessor computes. With dense weights the same functions are composed of other ops.

Where prefix int32 [B, 1] is given, scale, shift and gate are [2, D]: the first prefix[b] tokens of entry b take row 1,
the others row 0 (real-time chunking: rows that are given stand at the clean end of the solver's time).
"""

from types import ModuleType

import torch
from torch import Tensor

from innerloop.kernels.attention import attention
from innerloop.kernels.compile import available
from innerloop.kernels.euler import Guide
from innerloop.kernels.select import fused, on_device, unfused
from innerloop.kernels.skinny import compose, cross, cuda, reference
from innerloop.kernels.skinny.packing import WARP_COLUMNS, Packed, pack, unpack
from innerloop.kernels.skinny.start import chain

__all__ = [
    "WARP_COLUMNS",
    "Packed",
    "attend",
    "chain",
    "norm_attend",
    "norm_glu",
    "norm_linear",
    "norm_project_step",
    "norm_qkv_rope",
    "pack",
    "project_in",
    "project_residual",
    "supported",
    "unpack",
]


def supported(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether packed weights can be multiplied here: bfloat16, 1 to 64 rows, bulk copies, a run-time compiler."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or not 1 <= rows <= cuda.MAX_ROWS:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9 and available()


def norm_qkv_rope(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    prefix: Tensor | None = None,
) -> Tensor:
    """x [B, T, K] -> q [B, T, heads, D]: RMSNorm * (1 + scale) + shift, QKV product, half-split rotation of q and k.

    weight [(heads + 2 kv_heads) D, K] (packed with pair = D / 2), cos and sin float32 [B, T, D / 2]. K/V go to rows
    start .. start + T of the caches [B, S, kv_heads, D].
    """
    run = _implementation(x, weight).norm_qkv_rope
    q: Tensor = run(x, scale, shift, eps, weight, cos, sin, heads, kv_heads, k_cache, v_cache, start, prefix)
    return q


def attend(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, start: int) -> Tensor:
    """q [B, T, heads, D], k and v [B, S, kv_heads, D], key_valid int32 [B, S] or None -> [B, T, heads * D].

    Rows from `start` on are those that `norm_qkv_rope` just wrote; in a chain the others are read ahead of it.
    """
    fits = fused(q) and cuda.can_attend(q, k)
    out: Tensor = (cuda if fits else compose if on_device(q) else reference).attend(q, k, v, key_valid, scale, start)
    return out


def norm_linear(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    bias: Tensor,
    gelu: bool = False,
) -> Tensor:
    """x [B, T, K] -> (layer norm of x * scale + shift) W^T + b, [B, T, N]; gelu: its tanh form of that.

    scale and shift [K]: a layer norm's weight and bias, or 1 + scale and shift of AdaLN; weight [N, K] (pair = 8).
    """
    run = _implementation(x, weight).norm_linear
    out: Tensor = run(x, scale, shift, eps, weight, bias, gelu)
    return out


def norm_attend(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    bias: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    heads: int,
) -> Tensor:
    """x [B, T, K] -> its query product behind a layer norm (`norm_linear`), attended over k and v -> [B, T, heads * D].

    weight [heads * D, K] (pair = 8), k and v [B, S, heads, D], key_valid int32 [B, S] or None. One kernel for up to 32
    tokens an entry and keys within shared memory (about 700 of width 64); else `norm_linear`, then attention. In a
    chain keys, values and mask are read ahead.
    """
    if not on_device(x):
        return reference.norm_attend(x, scale, shift, eps, weight, bias, k, v, key_valid, heads)
    if isinstance(weight, Packed) and not unfused(x) and cross.fits(x, weight, k, heads):
        return cross.norm_attend(x, scale, shift, eps, weight, bias, k, v, key_valid, heads)
    q = norm_linear(x, scale, shift, eps, weight, bias).view(*x.shape[:2], heads, -1)
    return attention(q, k, v, key_valid, q.shape[-1] ** -0.5)


def project_residual(
    y: Tensor,
    weight: Tensor | Packed,
    gate: Tensor | None,
    residual: Tensor,
    bias: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """y [B, T, K], weight [N, K], gate and bias [N] or None, residual [B, T, N] -> residual + gate * (y W^T + b)."""
    out: Tensor = _implementation(y, weight).project_residual(y, weight, gate, residual, bias, prefix)
    return out


def norm_glu(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    weight: Tensor | Packed,
    prefix: Tensor | None = None,
) -> Tensor:
    """x [B, T, K], weight [2 F, K], gate rows first (packed with pair = F) -> gelu_tanh(gate) * up of the normed x."""
    out: Tensor = _implementation(x, weight).norm_glu(x, scale, shift, eps, weight, prefix)
    return out


def project_in(state: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, silu: bool = False) -> Tensor:
    """state float32 [B, T, A], weight [K, A], bias [K] -> [B, T, K] in dtype, summed in fp32; silu: the SiLU of that."""
    few = _few(state, weight, bias, dtype)
    module = cuda if few else compose if on_device(state) else reference
    out: Tensor = module.project_in(state, weight, bias, dtype, silu)
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
    """state + dt * (normed x W^T + b) in fp32: x [B, T, K], weight [A, K], state float32 [B, T, A].

    scale and shift [K] of every row. guide: pulls the step towards a previous chunk and imposes its given rows
    (kernels.euler.guide); weight 0 and prefix 0 change no bit. In a chain its tensors are read ahead.
    """
    few = _few(state, weight, bias, x.dtype)
    module = cuda if few else compose if on_device(x) else reference
    out: Tensor = module.norm_project_step(x, scale, shift, eps, weight, bias, state, dt, guide)
    return out


def _implementation(x: Tensor, weight: Tensor | Packed) -> ModuleType:
    if not on_device(x):
        return reference
    fits = isinstance(weight, Packed) and not unfused(x) and cuda.can_multiply(x, weight)
    return cuda if fits else compose


def _few(state: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> bool:
    if not fused(state) or state.numel() == 0:
        return False
    floats = weight.dtype is torch.float32 and bias.dtype is torch.float32 and state.dtype is torch.float32
    rows = state.numel() // state.shape[-1]
    return floats and cuda.can_step(state, weight) and supported(state.device, dtype, rows)
