"""Linear layers of many rows: cuBLASLt's, with the epilogue it has, or shares of a sum for the norm after it."""

from torch import Tensor

from innerloop.kernels import activation, rope
from innerloop.kernels.activation import Activation
from innerloop.kernels.linear import reference
from innerloop.kernels.select import chosen, fused, unfused


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """activation(x [..., K] @ weight [N, K]^T + bias [N]) -> [..., N]."""
    return chosen(reference.linear, x)(x, weight, bias, activation)


def into(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """`linear` without activation, in `out` [..., N]: a copy less where that is contiguous."""
    chosen(reference.into, x)(x, weight, bias, out)


def gated(x: Tensor, weight: Tensor, kind: Activation) -> Tensor:
    """x [..., K], weight [2 F, K], gate rows first -> activation(gate) * up [..., F]."""
    if unfused(x):
        return activation.glu(linear(x, weight), kind)
    return chosen(reference.gated, x)(x, weight, kind)


def rotated(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
) -> Tensor:
    """x [B, T, K], weight [(Hq + 2 Hkv) D, K] -> rotated q [B, T, Hq, D]; K/V as `rope.rotate_and_store` writes them."""
    if unfused(x):
        return rope.rotate_and_store(linear(x, weight), cos, sin, heads, kv_heads, k_cache, v_cache, start)
    return chosen(reference.rotated, x)(x, weight, cos, sin, heads, kv_heads, k_cache, v_cache, start)


def deferred(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Shares [P, ..., N] and a bias [N] or None, which add up to x [..., K] @ weight [N, K]^T + bias.

    For the norm that adds them to the residual: it does so in fp32, and a product of few tiles fills the device.
    """
    if unfused(x):
        return linear(x, weight, bias)[None], None
    return chosen(reference.deferred, x)(x, weight, bias)


def chains(x: Tensor) -> bool:
    """Whether x's products are worth a chain (`launch.dependent_launch`): few 16-bit rows, for kernels that overlap."""
    return fused(x) and reference.few_rows(x)


def batched(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """x [L, T, K], weight [L * N, K], bias [L * N] -> [L, T, N], in `out` if given: one kernel for all layers' products."""
    return chosen(reference.batched, x)(x, weight, bias, out, activation)
