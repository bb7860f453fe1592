"""Where and how a model runs, resolved or refused."""

from dataclasses import dataclass
from typing import get_args

import torch

from innerloop.contract import (
    PrecisionError,
)
from innerloop.kernels import Kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs."""

    device: torch.device
    precision: str
    batch: int = 1
    kernels: Kernels = "fused"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations; norms, heads and the solver stay float32."""
        return DTYPES[self.precision]


def place(device: str | None, precision: str | None, batch: int, kernels: Kernels) -> Placement:
    """Resolve defaults and refuse what cannot be met. Raises PrecisionError."""
    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = precision or ("bf16" if where.type == "cuda" else "fp32")
    if wanted == "fp16":
        raise PrecisionError(
            "fp16 is refused: these policies are trained in bf16, whose range fp16 does not have "
            "(activations overflow and actions come out wrong). Ask for bf16 or fp32"
        )
    if wanted not in DTYPES:
        raise PrecisionError(f"precision '{wanted}' does not exist; there are {sorted(DTYPES)}")
    if kernels not in get_args(Kernels):
        raise PrecisionError(f"kernels '{kernels}' do not exist; there are {', '.join(get_args(Kernels))}")
    if batch < 1:
        raise PrecisionError(f"batch={batch} decides for nobody; give the most robots that are decided for at once")
    return Placement(where, wanted, batch, kernels)


def _device(asked: str) -> torch.device:
    try:
        where = torch.device(asked)
    except RuntimeError as error:
        raise PrecisionError(f"there is no device '{asked}'; ask for cuda, cuda:1 or cpu") from error
    if where.type not in ("cuda", "cpu"):
        raise PrecisionError(f"device '{asked}' is not supported; ask for cuda, cuda:1 or cpu")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise PrecisionError(f"device '{asked}' was asked for, but torch sees no CUDA device; run innerloop doctor")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise PrecisionError(f"device '{asked}' was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return where
