"""Few-row linears (1 to 64 rows) with fused prologue and epilogue, for an action expert whose weights are re-read each step.

On a GPU with bulk copies (compute capability 9.0 and up) weights are packed once, and inside `chain()` each kernel
loads its weights while its predecessor computes. Elsewhere, with dense weights, the same functions run as a composition.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from innerloop.kernels.select import on_device
from innerloop.kernels.skinny import reference
from innerloop.kernels.skinny.packing import Packed, pack, unpack
