"""Triton's interpreter runs the kernels' own source on the CPU; every output starts as NaN."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any test imports one
sys.path.insert(0, str(Path(__file__).parents[3]))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel forgets to write is NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    torch.manual_seed(0)
    # exp(large) is infinity on the GPU too, and x / infinity is meant.
    with np.errstate(over="ignore"), warnings.catch_warnings():
        # Triton 3.6's interpreter turns one-element arrays into loop bounds.
        warnings.filterwarnings("ignore", message="Conversion of an array with ndim")
        yield
