"""Layers of one class, with their type kept."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


class Stack(nn.Module, Generic[Layer]):
    """A module list whose items have one type; parameters are named `0.`, `1.`, ..."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self._items = layers
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Layer:
        return self._items[index]

    def forward(self, *_: Any) -> Any:
        """A stack is walked, not called."""
        raise TypeError("a Stack is a list of layers: walk it")
