"""Flops, bytes and operations of a stage, read off one run of its reference path."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from innerloop.contract import Plan
from innerloop.kernels import use_kernels
from innerloop.runtime.arena import Arena
from innerloop.runtime.windows import Value, write_window

_GATHERS = {
    torch.ops.aten.embedding,
    torch.ops.aten.gather,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
}


_ATTENTION = "aten::_scaled_dot_product"  # torch's formulas refuse grouped heads, and some backends have none


@dataclass(frozen=True)
class Cost:
    """What one run of a stage must do at least.

    flops: of its matrix products, attention and convolutions. bytes: weights and plan buffers, at every use, read or
    written; what the stage makes for itself is taken to stay on the chip. unique_bytes: the same, each memory once.
    operations: aten operators that compute something (views are free).
    """

    flops: int = 0
    bytes: int = 0
    unique_bytes: int = 0
    operations: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.unique_bytes + other.unique_bytes,
            self.operations + other.operations,
        )


class Operator:
    """What is known of an aten operator whatever its arguments are; whole: it is not made of others."""

    def __init__(self, func: Any) -> None:
        returns = func._schema.returns
        self.view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.gathers = func._overloadpacket in _GATHERS
        self.whole = func._overloadpacket in flop_registry
        self._formula = flop_registry.get(func._overloadpacket)
        self._attention = func.name().startswith(_ATTENTION)

    def flops(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """Of one run."""
        if self._attention:
            return _attention_flops(*args[:3])
        return 0 if self._formula is None else int(self._formula(*args, **kwargs, out_val=result))


_operator = functools.cache(Operator)  # a stage may run some 500,000, of which few are different


class CostRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, adds up the operators that run, on any device, meta included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside: set[int] = set()
        self._uses: dict[tuple[int, int], int] = {}  # (storage, offset) -> bytes
        self._outside: set[int] = set()
        self._held: list[torch.UntypedStorage] = []  # an id is unique only while its storage lives
        self._flops = 0
        self._bytes = 0
        self._operations = 0

    @property
    def cost(self) -> Cost:
        """What has run so far."""
        return Cost(self._flops, self._bytes, sum(self._uses.values()), self._operations)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = _operator(func)
        if not operator.whole:
            with self:
                pieces = func.decompose(*args, **kwargs)
            if pieces is not NotImplemented:
                return pieces
            operator.whole = True
        result = func(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        if not operator.view:
            self._operations += 1
            self._flops += operator.flops(args, kwargs, result)
            for tensor in tensors:
                moved = _distinct_bytes(tensor)
                self._touch(tensor, min(moved, _distinct_bytes(result)) if operator.gathers else moved)
        self._adopt(tensors, _tensors((result,)))
        return result

    def _touch(self, tensor: torch.Tensor, moved: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._inside:
            return
        if storage._cdata not in self._outside:
            self._outside.add(storage._cdata)
            self._held.append(storage)
        self._bytes += moved
        place = (storage._cdata, int(tensor.storage_offset()))
        self._uses[place] = max(self._uses.get(place, 0), moved)

    def _adopt(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        outside = {tensor.untyped_storage()._cdata for tensor in inputs} - self._inside
        for tensor in results:
            storage = tensor.untyped_storage()._cdata
            if storage not in outside and storage not in self._outside:
                self._inside.add(storage)


def stage_costs(plan: Plan, inputs: Mapping[str, Value], device: torch.device) -> dict[str, Cost]:
    """Cost of every stage of a plan that runs each decision, by name, on an arena of its own holding `inputs`."""
    arena = Arena(plan, device)
    for name, value in inputs.items():
        write_window(arena, name, value)
    costs: dict[str, Cost] = {}
    with torch.no_grad(), use_kernels("reference"):
        for stage in plan.stages:
            if stage.prepare:
                stage.run(arena.tensors)
                continue
            with CostRecorder() as recorder:
                stage.run(arena.tensors)
            costs[stage.name] = recorder.cost
    return costs


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """q [B, H, T, D], k [B, Hkv, S, D], v [B, Hkv, S, E]."""
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Those among an operator's arguments or results, lists of tensors included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _distinct_bytes(tensor: torch.Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0]
    return math.prod(sizes) * tensor.element_size()
