"""Buffers whose words are polled: a consumer in the same chain reads each word as soon as it is there.

Between uses a buffer holds the ABSENT word everywhere. Who makes room, and why that is safe: docs of `Messages`.
"""

from math import prod

import torch
from torch import Tensor

from innerloop.contract.errors import InnerloopError

ABSENT = -1  # as int32: two bfloat16 NaN that no rounding gives

_AFTER = {
    "in": ("", "step"),
    "qkv": ("", "in", "down", "step"),
    "attend": ("qkv",),
    "out": ("qkv", "attend"),
    "glu": ("out",),
    "down": ("glu",),
    "step": ("down",),
}


class Messages:
    """The message buffers of one chain of expert layers: (in) (qkv attend out glu down)+ (step), any number of times.

    `glu` erases what its layer has consumed (qkv's and attend's messages, the layer's input) and what the next layer's
    `out` and `glu` will write, which come in two copies by turns; `step` erases its own input. `down` lets the next
    kernels start only once all of `glu` is there, so no kernel can poll a buffer before it was erased, and `in` only
    once everything before it has ended. All this rests on data dependences that run through every program.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._last = ""
        self._turn = 1

    @property
    def last(self) -> str:
        """The phase entered last."""
        return self._last

    def enter(self, phase: str) -> None:
        """Checks that the kernels of a chain come in the order that the erasing relies on."""
        if self._last not in _AFTER[phase]:
            raise InnerloopError(
                f"'{phase}' cannot follow '{self._last or 'nothing'}' in a chain, only one of {_AFTER[phase]}; call the "
                "ops of a layer in order, or outside chain()"
            )
        self._last = phase
        if phase == "qkv":
            self._turn ^= 1

    def allot(self, device: torch.device, **shapes: tuple[int, ...]) -> None:
        """Makes the named buffers, bfloat16 and ABSENT throughout, one after the other, where they do not exist yet."""
        missing = {name: shape for name, shape in shapes.items() if name not in self._buffers}
        if not missing:
            return
        sizes = {name: _whole(prod(shape)) for name, shape in missing.items()}
        memory = torch.empty(sum(sizes.values()) // 2, dtype=torch.int32, device=device)
        memory.fill_(ABSENT)
        at = 0
        for name, shape in missing.items():
            self._buffers[name] = memory.view(torch.bfloat16)[at : at + prod(shape)].view(shape)
            at += sizes[name]

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def own(self, name: str) -> Tensor:
        """This layer's copy of a buffer that comes in two."""
        return self._buffers[f"{name}{self._turn}"]

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the buffers."""
        at = tensor.data_ptr()
        return any(at == buffer.data_ptr() for buffer in self._buffers.values())

    def to_erase(self) -> list[tuple[int, int]]:
        """(address, bytes) of what this layer's `glu` makes room in."""
        other = self._turn ^ 1
        spans = (("x", "x"), ("q", "y"), (f"x{other}", f"x{other}"), (f"h{other}", f"h{other}"))
        return [self._span(*names) for names in spans]

    def _span(self, first: str, last: str) -> tuple[int, int]:
        a, b = self._buffers[first], self._buffers[last]
        return a.data_ptr(), b.data_ptr() + 2 * _whole(b.numel()) - a.data_ptr()


def _whole(elements: int) -> int:
    return -(-elements // 8) * 8  # 16 bytes
