"""Launch of source/rings.cu: products in warp group tiles, loaded by the tensor memory accelerator (compute capability 9.0).

A choice of a `Table` is one of these where it has a WIDTH. `warps` are those that multiply and two that load; `stages`
steps of rows and of weights are held at once.
"""

import ctypes
from functools import cache
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError
from innerloop.kernels import compile, launch
from innerloop.kernels.activation.reference import Activation
from innerloop.kernels.launch import Launch, Limits

SOURCE = Path(__file__).parent / "source" / "rings.cu"
STEP = 64  # columns of x a step: 128 bytes of bfloat16, the widest swizzle
ROOM = 225 * 1024  # bytes of a multiprocessor's shared memory that a program may have
REGISTERS = (232, 168, 128, 96)  # a thread, by groups: a quarter of a multiprocessor's for its share of the warps
KINDS: dict[Activation | None, int] = {None: 0, "gelu_tanh": 1, "silu": 2, "relu": 3}


class RingsArgs(ctypes.Structure):
    """`Args` of source/rings.cu; the tensor maps' alignment makes its size a multiple of 64."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 16) for name in ("x", "w")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "columns", "steps", "share_steps", "row_tiles", "column_tiles", "x_bytes", "dependent")
        ),
        ("unused", ctypes.c_int * 4),
    )


def tile(groups: int, width: int, split: int = 1, depth: int = 1) -> Launch:
    """64 * groups rows times width of the weight's; `depth` groups share a tile's steps, each with places of its own.

    Rings as long as a multiprocessor's shared memory is: shorter ones, two to a multiprocessor, were slower.
    """
    stages = min(16, ROOM // ((groups * 64 + width) * STEP * 2)) // depth * depth
    return Launch.of(4 * groups * depth + 2, stages, WIDTH=width, SPLIT=split, DEPTH=depth)


def is_rings(choice: Launch) -> bool:
    """Whether a choice is one of this kernel."""
    return any(name == "WIDTH" for name, _ in choice.sizes)


def shared_bytes(choice: Launch) -> int:
    """Of one program: the rings, and what it takes to begin at a multiple of 1,024."""
    return choice.stages * (groups_of(choice) * 64 + choice["WIDTH"]) * STEP * 2 + 1024


def groups_of(choice: Launch) -> int:
    """Groups of warps that have rows of their own."""
    return choice.warps // 4 // choice["DEPTH"]


def suits(choice: Launch, rows: int, columns: int, inner: int, device: Limits, gated: bool = False) -> bool:
    """Whether the kernel takes a product of this size so, and can be compiled here.

    Whole boxes, no share empty, no group without rows, and all programs at once. columns: of the result; a gated
    product's weight has twice as many rows.
    """
    groups, depth, width, split = groups_of(choice), choice["DEPTH"], choice["WIDTH"], choice["SPLIT"]
    out, rings = width // 2 if gated else width, shared_bytes(choice) - 1024
    if (
        inner % 8
        or columns % 8
        or out % 8
        or choice.stages < 2 * depth
        or width // 2 + 34 > REGISTERS[groups * depth - 1]
        or not compile.available()
    ):
        return False
    if max(groups * 64 * (out * 2 + 16), (depth - 1) * groups * 256 * width) > rings:
        return False  # the result, or the sums of the other groups, pass through the rings' memory
    steps = ceil(inner / STEP)
    if (split - 1) * ceil(steps / split) >= steps or rows <= (groups - 1) * 64:
        return False
    return programs(choice, rows, columns, gated) <= device.multiprocessors


def programs(choice: Launch, rows: int, columns: int, gated: bool) -> int:
    """Tiles of all shares."""
    row_tiles, column_tiles = grid(choice, rows, columns, gated)
    return row_tiles * column_tiles * choice["SPLIT"]


def _box_rows(rows: int, groups: int) -> int:
    """Rows of x that a step loads: a tile's, or as many eights as there are; what is not loaded makes no row of the result."""
    return min(groups * 64, ceil(rows / 8) * 8)


def grid(choice: Launch, rows: int, columns: int, gated: bool) -> tuple[int, int]:
    """Tiles along rows and columns."""
    out = choice["WIDTH"] // 2 if gated else choice["WIDTH"]
    return ceil(rows / (groups_of(choice) * 64)), ceil(columns / out)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, choice: Launch, activation: Activation | None, gated: bool = False
) -> Tensor:
    """x [T, K], weight [N, K] -> shares [SPLIT, T, N]; gated: activation(gate) * up, [SPLIT, T, N / 2]."""
    x, weight = _aligned(x), _aligned(weight)
    (rows, inner), columns = x.shape, weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((choice["SPLIT"], rows, columns), dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = grid(choice, rows, columns, gated)
    steps, dependent, box = ceil(inner / STEP), launch.dependent(), _box_rows(rows, groups_of(choice))
    arguments = RingsArgs(
        x=_tensor_map(x, box), w=_tensor_map(weight, choice["WIDTH"] // (2 if gated else 1)),
        bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        rows=rows, columns=columns, steps=steps, share_steps=ceil(steps / choice["SPLIT"]), row_tiles=row_tiles,
        column_tiles=column_tiles, x_bytes=box * STEP * 2, dependent=dependent,
    )  # fmt: skip
    size = shared_bytes(choice)
    with torch.cuda.device(x.device):
        fixed = compile.fixed(defines(choice, bias is not None, activation, gated))
        function = compile.kernel(SOURCE, fixed, "sm_90a", size, torch.cuda.current_device(), multiply(choice["WIDTH"]))
        count = programs(choice, rows, columns, gated)
        compile.launch(function, count, choice.warps * 32, size, 1, dependent, arguments)
    return out


def defines(choice: Launch, biased: bool, activation: Activation | None, gated: bool) -> dict[str, int]:
    """What source/rings.cu is compiled with for a choice."""
    return {
        "GROUPS": groups_of(choice), "WIDTH": choice["WIDTH"], "DEPTH": choice["DEPTH"], "STAGES": choice.stages,
        "BIAS": int(biased), "GLU": int(gated), "ACTIVATION": KINDS[activation],
    }  # fmt: skip


def multiply(width: int) -> str:
    """The source of `multiply`: sums += 64 rows of x times `width` rows of w, over 16 columns."""
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return (
        f"DEVICE void multiply(float (&sums)[{count}], u64 x, u64 w) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, '
        f'1, 1, 1, 0, 0;" : {operands} : "l"(x), "l"(w));\n}}\n'
    )


def _aligned(t: Tensor) -> Tensor:
    """Rows one after another from a multiple of 16 bytes on, as the tensor memory accelerator reads them."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def _tensor_map(t: Tensor, rows: int) -> "ctypes.Array[ctypes.c_uint64]":
    """Boxes of `rows` x 64 of a bfloat16 matrix, swizzled over 128 bytes; what lies outside is zero.

    Not through cuda-bindings, whose map need not begin at a multiple of 64 bytes, as the driver asks.
    """
    memory = ctypes.create_string_buffer(192)
    at = ceil(ctypes.addressof(memory) / 64) * 64
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    status = _encoder()(
        ctypes.c_void_p(at), 9, u32(2), ctypes.c_void_p(t.data_ptr()), (u64 * 2)(t.shape[1], t.shape[0]),
        (u64 * 1)(t.shape[1] * 2), (u32 * 2)(STEP, rows), (u32 * 2)(1, 1), 0, 3, 3, 0,
    )  # BFLOAT16; no interleaving, SWIZZLE_128B, L2_PROMOTION_L2_256B, zeros outside (cuda.h)  # fmt: skip
    if status:
        raise InnerloopError(
            f"cuTensorMapEncodeTiled failed with {status} for a matrix of {list(t.shape)}; run with use_kernels('reference')"
        )
    return (u64 * 16).from_buffer_copy(ctypes.string_at(at, 128))


@cache
def _encoder() -> "ctypes._NamedFuncPointer":
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
