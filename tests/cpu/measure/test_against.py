"""Other implementations by name: who has which family, what is missing said with the remedy, torch.compile end to end."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import innerloop
from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.kernels import select
from innerloop.measure import record
from innerloop.measure.against.torch_compile import CompiledPolicy
from innerloop.measure.command import bench_command
from innerloop.measure.message import Message
from innerloop.measure.options import BenchOptions
from innerloop.measure.side_by_side import KNOWN, Bench
from innerloop.measure.subject import make_workload
from innerloop.policies import FAMILIES
from recipes.tiny import groot, starvla

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples/checkpoints/tiny-pi05"
CHECKPOINTS = {"pi05": TINY, "pi0": ROOT / "tests/golden/tiny-pi0"}
# torch's own, when its compiler is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def test_every_family_has_something_to_be_compared_with() -> None:
    for family in FAMILIES:
        names = [name for name, known in KNOWN.items() if family in known.families]
        assert "torch-compile" in names
        for name in set(KNOWN) - set(names):
            with pytest.raises(InnerloopError, match=f"{name} has nothing .* --against {', '.join(names)}$"):
                Bench(BenchOptions(family, random_weights=True, against=(name,)))


def test_a_checkpoint_shows_its_family_before_anything_is_loaded() -> None:
    with pytest.raises(InnerloopError, match="transformers has nothing to compare pi05 with; use --against lerobot"):
        Bench(BenchOptions(str(TINY), against=("transformers",)))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InnerloopError, match="nothing named 'jax'.*openpi, transformers, torch-compile"):
        Bench(BenchOptions(str(TINY), against=("jax",)))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[record.Record], list[str]]:
    """Records of the shipped policy with two solver steps, beside torch.compile; what was logged meanwhile."""
    directory = shutil.copytree(TINY, tmp_path_factory.mktemp("two-steps") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_inference_steps": 2}))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("innerloop")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    options = BenchOptions(
        str(directory), device="cpu", frames="64x48", prompt_tokens=60, ticks=8, ladder=True, against=("torch-compile",)
    )
    try:
        return bench_command(options, Console(quiet=True)), lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_torch_compile_agrees_and_is_timed(compiled: tuple[list[record.Record], list[str]]) -> None:
    whole = compiled[0][0]
    assert isinstance(whole, record.LatencyRecord)
    assert whole.agreement["torch-compile"]["max_abs"] < 1e-4
    assert whole.against["torch-compile"] > 0


def test_it_has_a_rung_between_the_eager_plan_and_the_engine(compiled: tuple[list[record.Record], list[str]]) -> None:
    ladder = compiled[0][1]
    assert isinstance(ladder, record.LadderRecord)
    assert [rung.name for rung in ladder.rungs] == [
        "plan, eager, plain torch",
        "plan, torch.compile a stage",
        "engine, nothing captured",
    ]
    assert ladder.rungs[1].launches > 0
    assert ladder.rungs[1].max_abs < 1e-4


def test_it_says_that_it_takes_long_and_how_far_it_is(compiled: tuple[list[record.Record], list[str]]) -> None:
    said = [line for line in compiled[1] if line.startswith("torch-compile: ")]
    assert "5 stages of pi05 (layout, prompt, vision, context, action)" in said[0]
    assert "takes minutes" in said[0]
    assert [line.split()[1] for line in said[1:6]] == ["layout,", "prompt,", "vision,", "context,", "one"]


@pytest.fixture(params=["pi05", "pi0", "groot", "pi3", "oft", "fast"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoadedPolicy]:
    """A policy of every kind of head in plain torch; bf16, so that its buffers have items of different sizes."""
    name, robot = request.param, None
    if name in CHECKPOINTS:
        directory = CHECKPOINTS[name]
    elif name == "groot":
        directory, robot = groot.write(tmp_path), groot.LIBERO
    else:
        directory = starvla.write(tmp_path, starvla.RUNS[name])
    loaded = innerloop.load(directory, device="cpu", precision="bf16", assets=robot, kernels="reference")
    yield loaded
    loaded.close()


def test_every_stage_is_one_graph_on_a_gpu_too(plain: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of torch.compile but its code generation; the solver steps of pi0 and pi0.5 share one graph.

    Kernels are asked for by each call, as on a GPU, where a context variable holds the choice.
    """
    asking = [
        module for name, module in sys.modules.items() if name.startswith(("innerloop.kernels", "innerloop.blocks"))
    ]
    for module in asking:
        for name, kinds in (("on_device", ("operators", "fused")), ("unfused", ("operators",)), ("fused", ("fused",))):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda x, kinds=kinds: select._selected.get() in kinds)
    monkeypatch.setattr(
        plain.processor, "finish", lambda normalized, _: normalized
    )  # no answer of random weights parses
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_it(function, backend="aot_eager", **given))
    other = CompiledPolicy(plain)
    workload = make_workload(plain, (48, 64), max(plain.plans), Message("raw"))
    observation, noise = workload.observations[0], workload.noises[0]
    expected = plain.infer(observation, noise=noise).normalized
    with torch._dynamo.config.patch(error_on_recompile=plain.family.name in CHECKPOINTS):
        np.testing.assert_allclose(other.infer(observation, noise), expected, atol=1e-4)
    torch.compiler.reset()


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = starvla.write(tmp_path, starvla.RUNS["oft"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    made = Bench(BenchOptions(str(directory), device="cpu", against=("transformers",)))
    with pytest.raises(InnerloopError, match=r"(?s)module transformers.*pip install 'transformers"), made.references():
        pass


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    line = ["-W", "ignore", "-m", "innerloop", "bench", str(TINY), "--device", "cpu", "--against", "torch-compile"]
    words = [sys.executable, *line, "--prompt-tokens", "60"]
    nowhere = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    nowhere["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    for name in ("CC", "CXX"):
        nowhere.pop(name, None)
    done = subprocess.run(words, env=nowhere, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "torch.compile does not work here for cpu" in said
    assert "apt install g++ python3-dev" in said
    assert "Traceback" not in said
