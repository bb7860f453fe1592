"""Which implementation a kernel call runs: the plain-torch meaning or the Triton kernel."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, TypeVar

import torch

Kernels = Literal["reference", "operators", "fused"]
F = TypeVar("F", bound=Callable[..., Any])

_selected: ContextVar[Kernels] = ContextVar("kernels", default="fused")


def selected() -> Kernels:
    """`reference`: plain torch. `operators`: Triton, one elementary op a kernel. `fused`: Triton, fused."""
    return _selected.get()


@contextmanager
def use_kernels(kind: Kernels) -> Iterator[None]:
    """Runs the body with another choice of kernels; what is captured inside keeps it."""
    token = _selected.set(kind)
    try:
        yield
    finally:
        _selected.reset(token)


def on_device(x: torch.Tensor) -> bool:
    """Whether a call on `x` goes to Triton."""
    return x.is_cuda and _selected.get() != "reference"


def unfused(x: torch.Tensor) -> bool:
    """Whether a fused call on `x` is to be made of elementary kernels."""
    return x.is_cuda and _selected.get() == "operators"


def fused(x: torch.Tensor) -> bool:
    """Whether a call on `x` goes to fused kernels, which overlap in a chain (`launch.dependent_launch`)."""
    return x.is_cuda and _selected.get() == "fused"


def chosen(reference: F, x: torch.Tensor) -> F:
    """`reference` itself, or its namesake in the `triton` module beside it when `x` calls for that."""
    return _twin(reference) if on_device(x) else reference


def by_device(reference: F, x: torch.Tensor) -> F:
    """As `chosen`, but a GPU has the kernel whatever is selected: where torch's operators have no form to capture."""
    return _twin(reference) if x.is_cuda else reference


@cache
def _twin(reference: F) -> F:
    # Triton is imported on first use: it does not exist on every machine that runs the reference.
    module = importlib.import_module(reference.__module__.removesuffix("reference") + "triton")
    twin: F = getattr(module, reference.__name__)
    return twin
