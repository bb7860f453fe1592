"""What stands beside ours in a benchmark, on a GPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import innerloop
from innerloop.engine import LoadedPolicy
from innerloop.measure.against.torch_compile import CompiledPolicy
from innerloop.measure.bench import Reference
from innerloop.measure.command import bench_command
from innerloop.measure.message import Message
from innerloop.measure.options import BenchOptions
from innerloop.measure.record import LadderRecord, LatencyRecord
from innerloop.measure.subject import make_workload
from recipes.tiny import groot, starvla

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # fp32 is compared as fp32
]
TINY = Path(__file__).parents[3] / "examples/checkpoints/tiny-pi05"


def test_torch_compile_in_record_and_ladder() -> None:
    options = BenchOptions(
        str(TINY), device="cuda", prompt_tokens=60, ticks=100, ladder=True, against=("torch-compile",)
    )
    whole, ladder = bench_command(options, Console())
    assert isinstance(whole, LatencyRecord)
    assert whole.agreement["torch-compile"]["cosine"] > 0.999
    assert isinstance(ladder, LadderRecord)
    names = [rung.name for rung in ladder.rungs]
    assert names[:3] == ["plan, eager, plain torch", "plan, torch.compile a stage", "captured, plain torch"]
    eager, compiled = ladder.rungs[:2]
    assert 0 < compiled.launches < eager.launches


@pytest.fixture(params=["groot", "gr00t", "pi3", "oft"])
def policies(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LoadedPolicy, LoadedPolicy]]:
    """Ours, and the same in plain torch."""
    groots = request.param == "groot"
    directory = groot.write(tmp_path) if groots else starvla.write(tmp_path, starvla.RUNS[request.param])
    robot = groot.LIBERO if groots else None
    opened = [
        innerloop.load(directory, device="cuda", precision="fp32", assets=robot, kernels=kernels)
        for kernels in ("fused", "reference")
    ]
    yield opened[0], opened[1]
    for policy in opened:
        policy.close()


def _agree(other: Reference, policies: tuple[LoadedPolicy, LoadedPolicy]) -> None:
    workload = make_workload(policies[0], (48, 64), 256, Message("raw"))
    for observation, noise in list(zip(workload.observations, workload.noises, strict=True))[:3]:
        expected = policies[0].infer(observation, noise=noise).normalized
        np.testing.assert_allclose(other.infer(observation, noise), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("policies", ["groot", "pi3", "oft"], indirect=True)  # gr00t's head is groot's
def test_torch_compile_of_other_heads(policies: tuple[LoadedPolicy, LoadedPolicy]) -> None:
    _agree(CompiledPolicy(policies[1]), policies)
    torch.compiler.reset()


def test_transformers_below_our_head(policies: tuple[LoadedPolicy, LoadedPolicy]) -> None:
    pytest.importorskip("transformers")
    from innerloop.measure.against.transformers import TransformersPolicy

    _agree(TransformersPolicy(policies[1]), policies)
