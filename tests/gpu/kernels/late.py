"""A producer that is late: it lets its successor start, sleeps, and only then writes what that one reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from innerloop.kernels import launch
from innerloop.kernels.compile import compiled_with

INT32 = torch.int32
SLEEP = "nanosleep.u32 200000; nanosleep.u32 200000; mov.b32 $0, $1;"
PROGRAMS = 8
Call = Callable[[torch.Tensor], Any]


@triton.jit  # type: ignore[untyped-decorator]
def write_late(  # type: ignore[no-untyped-def]
    source_ptr, target_ptr, words, memory_ptr, kept_ptr, held, SLEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Lets its successor start, sleeps, and only then writes `target` and reads `memory`."""
    tl.extra.cuda.gdc_launch_dependents()
    nothing = tl.inline_asm_elementwise(
        SLEEP, "=r,r", [tl.zeros((32,), tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
    begin, step = tl.program_id(0) * BLOCK + tl.sum(nothing, 0), tl.num_programs(0) * BLOCK
    for at in range(begin, words, step):
        word = at + tl.arange(0, BLOCK)
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=word < words, other=0), mask=word < words)
    tl.debug_barrier()  # no load moves up across it
    for at in range(begin, held, step):
        word = at + tl.arange(0, BLOCK)
        tl.store(kept_ptr + word, tl.load(memory_ptr + word, mask=word < held, other=0), mask=word < held)


def launch_late(
    source: torch.Tensor, target: torch.Tensor, memory: torch.Tensor, kept: torch.Tensor, held: int
) -> None:
    """`write_late` over 32-bit words, by few programs: on the other multiprocessors its successor finds all it asks for."""
    write_late[(PROGRAMS,)](source, target, source.numel(), memory, kept, held, SLEEP=SLEEP, BLOCK=1024, num_warps=1)


class Memory:
    """torch.empty out of one known piece of memory, so that a test knows where a kernel will write."""

    def __init__(self, size: int) -> None:
        self.words = torch.zeros(size // 4, dtype=INT32, device="cuda")
        self.used = 0

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As torch.empty; every piece begins at a multiple of 256 bytes."""
        count = torch.Size(shape).numel() * dtype.itemsize
        piece = self.words.view(torch.uint8)[self.used : self.used + count]
        self.used += -(-count // 256) * 256
        return piece.view(dtype).view(shape)


def results_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a call's result."""
    return list(result) if isinstance(result, tuple) else [result]


def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kernels start early and do not wait."""
    usual = launch.options
    monkeypatch.setattr(launch, "options", lambda *given: {**usual(*given), "PDL": False})


def one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no kernel starts early; the choices stay those of a chain."""
    usual = launch.options
    monkeypatch.setattr(launch, "options", lambda *given: {**usual(*given), "PDL": False, "launch_pdl": False})


def delayed(result: torch.Tensor) -> torch.Tensor:
    """A copy that lets its successor start, sleeps, and only then writes."""
    moved = torch.zeros_like(result)
    nothing = torch.zeros(1, dtype=INT32, device="cuda")
    source, target = (t.view(-1).view(INT32) for t in (result, moved))
    launch_late(source, target, nothing, nothing, 0)
    return moved


def behind_delayed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, whose results reach the next kernel of a chain late."""

    def wrapped(*given: Any, **named: Any) -> Any:
        result = call(*given, **named)
        if not launch.dependent():
            return result
        if isinstance(result, torch.Tensor):
            return delayed(result)
        first, second = result
        if second is None or second.dim() == 1:  # shares and their bias
            return delayed(first), second
        return delayed(first), delayed(second)

    return wrapped


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `call`, run once before, and what it leaves."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def starts_early(given: torch.Tensor, consume: Call, patched: pytest.MonkeyPatch) -> bool:
    """Checks a kernel behind a late producer of `given`; whether, without its wait, it went wrong.

    It neither reads what its predecessor has yet to write, nor writes what that has yet to read.
    """
    memory, late = Memory(16 << 20), torch.zeros_like(given)
    source, target = given.view(-1).view(INT32), late.view(-1).view(INT32)
    with launch.dependent_launch():
        expected = [t.clone() for t in results_of(consume(given))]
        patched.setattr(torch, "empty", memory.empty)
        patched.setattr(torch, "empty_like", lambda t: memory.empty(t.shape, t.dtype, t.device))
        consume(late)
        held = memory.used // 4
        kept = torch.zeros_like(memory.words[:held])

        def both() -> list[torch.Tensor]:
            memory.used = 0
            memory.words.fill_(0x11111111)
            for stale in (late, kept):
                stale.zero_()
            launch_late(source, target, memory.words, kept, held)
            return results_of(consume(late))

        graph, results = captured(both)
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(want, have) for want, have in zip(expected, results, strict=True))
            assert (kept == 0x11111111).all()
        unguarded(patched)
        with compiled_with(UNGUARDED=1):
            graph, results = captured(both)
        graph.replay()
        return not all(torch.equal(want, have) for want, have in zip(expected, results, strict=True))
