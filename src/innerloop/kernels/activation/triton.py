"""Element-wise activations and gated linear units over rows of columns."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from innerloop.kernels import launch
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.device import given_or_usual, release_successor, wait_for_producer
from innerloop.kernels.launch import Launch, Table

TABLE = Table(
    "activation",
    default=[
        Launch.of(4, BLOCK=1024),
        Launch.of(4, BLOCK=2048),
        Launch.of(8, BLOCK=4096),
        Launch.of(2, BLOCK=512),
        Launch.of(8, BLOCK=2048),
    ],
)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """One activation of an fp32 tile, by name."""
    if KIND == "gelu_tanh":
        # x / 2 (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "relu2", "unknown activation")
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def _activate(
    x_ptr, bias_ptr, prefix_ptr, out_ptr, width, x_stride, tokens, bias_stride,
    GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    release_successor(PDL)
    wait_for_producer(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=held, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        if prefix_ptr is None:
            x += tl.load(bias_ptr + column, mask=held, other=0.0).to(tl.float32)
        else:
            given = row % tokens < tl.load(prefix_ptr + row // tokens)
            x += given_or_usual(bias_ptr, bias_stride, column, width, given)
    y = activated(x, KIND)
    if GATED:
        y = y * tl.load(x_ptr + row * x_stride + width + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=held)


def activate(x: Tensor, kind: Activation, bias: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    """See kernels.activation."""
    return _run(x, x.shape[-1], kind, bias, prefix)


def glu(gate_up: Tensor, kind: Activation) -> Tensor:
    """See kernels.activation."""
    return _run(gate_up, gate_up.shape[-1] // 2, kind)


def _run(x: Tensor, width: int, kind: Activation, bias: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if out.numel() == 0:
        return out
    choice = launch.choose(TABLE, (rows.shape[0], width), x.device)
    grid = (rows.shape[0], triton.cdiv(width, choice["BLOCK"]))
    bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
    tokens, stride = (1, 0) if bias is None or prefix is None else (x.shape[-2], bias.stride(0))
    _activate[grid](
        rows, bias, prefix, out, width, rows.stride(0), tokens, stride,
        GATED=width < x.shape[-1], KIND=kind, **launch.options(choice, x.device),
    )  # fmt: skip
    return out
