"""What kernels share inside: when a dependent launch may read, when its successor may start, exact products, rows that are given."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

# The interpreter holds bf16 as integers and would multiply those.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def wait_for_producer(PDL: tl.constexpr):
    """Before the first access to what an earlier kernel reads or writes, but for what `launch.dependent_launch` lets them
    read ahead.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_successor(PDL: tl.constexpr):
    """Lets the next kernel start, once every program of this one did; it still waits for this one's end before it reads.

    First of all, so that weights are on their way during several kernels. Behind the wait where the next kernel reads ahead
    what is no weight: what ran before this one has ended then.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def given_or_usual(ptr, stride, column, width, given):
    """The second row of a table [2, D] where `given`, in fp32; else the first, whose load does not wait to know."""
    usual = tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)
    other = tl.load(ptr + stride + column, mask=column < tl.where(given, width, 0), other=0.0).to(tl.float32)
    return tl.where(given, other, usual)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32: tensor cores for 16-bit operands, no TF32 for fp32 ones."""
    if _INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc
