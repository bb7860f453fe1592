"""Attention over cached keys: full, causal, with a mask of valid keys, with few queries."""

from torch import Tensor

from innerloop.kernels.attention import reference
from innerloop.kernels.select import chosen


def attention(q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """q [B, T, Hq, D], k and v [B, S, Hkv, D], key_valid int32 [B, S] or None -> [B, T, Hq * D].

    Query head h reads K/V head h // (Hq / Hkv). Causal: query i sees keys up to i + S - T. Softmax in fp32.
    A query that may see no key gives zeros. Blocks of keys without a valid one are skipped on the device.
    """
    return chosen(reference.attention, q)(q, k, v, key_valid, scale, causal)
