"""Products of several layers in one kernel on a CUDA device, every candidate, results that start as NaN."""

import pytest
import torch

from bench.case import earned
from innerloop.kernels import launch, linear
from innerloop.kernels.linear import batch, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [
    (1, 1, 64, 64),
    (3, 7, 80, 72),
    (3, 63, 200, 136),
    (3, 169, 1024, 2560),
    (36, 192, 256, 1024),
    (3, 300, 96, 512),
]


def _operands(
    layers: int, rows: int, columns: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(layers, rows, inner, device="cuda").to(dtype)
    weight = (torch.randn(layers * columns, inner, device="cuda") * inner**-0.5).to(dtype)
    return x, weight, torch.randn(layers * columns, device="cuda").to(dtype)


def _check(label: str, operands: tuple[torch.Tensor, ...], width: int) -> None:
    """The product into rows of a longer memory of NaN."""
    x, weight, bias = operands
    memory = torch.full((x.shape[0], x.shape[1] + 3, width), float("nan"), dtype=x.dtype, device="cuda")
    out = linear.batched(x, weight, bias, memory[:, : x.shape[1]])
    truth = reference.batched(x.float(), weight.float(), bias.float())
    earned(label, out, reference.batched(x, weight, bias), truth, slack=2e-5)
    assert memory[:, x.shape[1] :].isnan().all()


@pytest.mark.parametrize(("layers", "rows", "columns", "inner"), SIZES)
def test_against_fp32(layers: int, rows: int, columns: int, inner: int) -> None:
    operands = _operands(layers, rows, columns, inner, torch.bfloat16)
    shape = (layers, rows, columns, inner, 2)
    for choice in launch.candidates(batch.TABLE, shape, launch.limits(torch.device("cuda"))):
        with launch.forced({("linear.batched", shape): choice}):
            _check(f"{choice}", operands, columns)


def test_fp32_is_the_librarys() -> None:
    _check("fp32", _operands(3, 19, 80, 72, torch.float32), 80)


def test_captured_once_it_reads_what_lies_there() -> None:
    x, weight, bias = _operands(3, 192, 256, 512, torch.bfloat16)
    linear.batched(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear.batched(x, weight, bias)
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        truth = reference.batched(x.float(), weight.float(), bias.float())
        earned("replayed", out, reference.batched(x, weight, bias), truth, slack=2e-5)
