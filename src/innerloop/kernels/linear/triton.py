"""Linear layers on the device: cuBLASLt with a bias or a bias-and-GELU epilogue; other activations follow it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.kernels.activation import triton as activation_triton
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.select import unfused


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None) -> Tensor:
    """See kernels.linear."""
    if activation is None:
        return _product(x, weight, bias)
    if activation == "gelu_tanh" and bias is not None and not unfused(x):
        rows = x.reshape(-1, x.shape[-1])
        # CUBLASLT_EPILOGUE_GELU_BIAS is the tanh form.
        out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], weight.shape[0])
    return activation_triton.activate(_product(x, weight, bias), activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return F.linear(x, weight)
    out = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])
