"""One folder an op: the function callers use, its plain-torch meaning, its Triton kernel, its cost.

May import runtime and contract. Nothing here knows a model.
"""

from innerloop.kernels.select import Kernels, fused, selected, use_kernels

__all__ = ["Kernels", "fused", "selected", "use_kernels"]
