"""What stands beside ours in a benchmark, with the real packages: the same actions from the same weights and noise."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import innerloop
from innerloop.cli import app
from innerloop.contract import InnerloopError
from innerloop.measure import record
from innerloop.measure.against.lerobot import LeRobotPolicy, sized
from innerloop.measure.against.opening import open_official
from innerloop.measure.against.openpi import OpenpiPolicy
from innerloop.measure.against.torch_compile import CompiledPolicy
from innerloop.measure.against.transformers import TransformersPolicy
from innerloop.measure.command import bench_command
from innerloop.measure.message import Message
from innerloop.measure.options import BenchOptions
from innerloop.measure.subject import make_workload
from recipes.tiny import groot, starvla
from recipes.tiny.make import Recipe, write

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # fp32, normalised actions
CHATS = ("groot", *sorted(set(starvla.RUNS) - {"fast"}))


def decisions(policy, tokens):
    """Observations and noise of three decisions."""
    workload = make_workload(policy, (48, 64), tokens, Message("raw"))
    return list(zip(workload.observations, workload.noises, strict=True))[:3]


@pytest.fixture(params=CHATS)
def chat(request, tmp_path):
    """A directory on Qwen3-VL, and which of its robots."""
    if request.param == "groot":
        return groot.write(tmp_path / "groot"), groot.LIBERO
    return starvla.write(tmp_path / "run", starvla.RUNS[request.param]), None


def test_transformers_below_our_head(chat):
    directory, robot = chat
    ours = innerloop.load(directory, device="cpu", assets=robot)
    other = TransformersPolicy(innerloop.load(directory, device="cpu", assets=robot, kernels="reference"))
    for observation, noise in decisions(ours, 260):
        expected = ours.infer(observation, noise=noise).normalized
        np.testing.assert_allclose(other.infer(observation, noise), expected, atol=TOLERANCE, rtol=0)
    other.policy.close()
    ours.close()


def test_its_language_model_is_what_decides(tmp_path):
    """One weight of transformers' own copy moves the actions."""
    policy = innerloop.load(starvla.write(tmp_path, starvla.RUNS["oft"]), device="cpu", kernels="reference")
    other = TransformersPolicy(policy)
    (observation, noise), *_ = decisions(policy, 260)
    before = other.infer(observation, noise)
    norm = other._model.language_model.layers[2].input_layernorm
    norm.weight.data = norm.weight.data + 1.0  # no longer the memory that ours reads
    assert np.abs(other.infer(observation, noise) - before).max() > 1e-2
    policy.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("name", ["pi05", "pi3"])
def test_torch_compile_of_this_torch(name, tmp_path, monkeypatch):
    """All but its code generation; bf16, so that a plan's buffers have items of different sizes."""
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_it(function, backend="aot_eager", **given))
    directory = write(tmp_path, Recipe(name)) if name == "pi05" else starvla.write(tmp_path, starvla.RUNS[name])
    plain = innerloop.load(directory, device="cpu", precision="bf16", kernels="reference")
    other = CompiledPolicy(plain)
    for observation, noise in decisions(plain, max(plain.plans)):
        expected = plain.infer(observation, noise=noise).normalized
        np.testing.assert_allclose(other.infer(observation, noise), expected, atol=TOLERANCE, rtol=0)
    plain.close()
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_openpis_signatures_around_lerobots_port_of_it(family, tmp_path, monkeypatch):
    """LeRobot's core has openpi's parameters under openpi's names, and its arithmetic."""
    recipe = Recipe(family)
    directory = write(tmp_path, recipe)
    lerobot = LeRobotPolicy(directory)
    monkeypatch.syspath_prepend(str(ROOT / "tests/cpu/measure/fake_openpi"))
    module = import_module("openpi.models_pytorch.pi0_pytorch")

    class Port(type(lerobot.policy.model)):
        def __init__(self, config):
            assert config.pi05 == (family == "pi05")
            with sized(family, recipe.architecture()):
                super().__init__(lerobot.config)

        def sample_actions(self, device, observation, noise=None, num_steps=10):
            pictures = [image.permute(0, 3, 1, 2) for image in observation.images.values()]
            state = () if family == "pi05" else (observation.state,)
            prompt = (observation.tokenized_prompt.long(), observation.tokenized_prompt_mask)
            given = (pictures, list(observation.image_masks.values()), *prompt, *state)
            with torch.no_grad():
                return super().sample_actions(*given, noise=noise, num_steps=num_steps)

    monkeypatch.setattr(module, "PI0Pytorch", Port)
    ours = innerloop.load(directory, device="cpu")
    other = OpenpiPolicy(innerloop.load(directory, device="cpu", kernels="reference"))
    for observation, noise in decisions(ours, max(ours.plans)):
        expected = ours.infer(observation, noise=noise).normalized
        np.testing.assert_allclose(other.infer(observation, noise), expected, atol=TOLERANCE, rtol=0)
    for policy in (ours, other.policy):
        policy.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "openpi"]:
        del sys.modules[name]


def test_a_record_beside_lerobot(tmp_path):
    directory = shutil.copytree(ROOT / "examples/checkpoints/tiny-pi05", tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_inference_steps": 1}))  # LeRobot takes its time
    options = BenchOptions(
        str(directory), device="cpu", frames="64x48", prompt_tokens=60, ticks=4, ladder=True, against=("lerobot",)
    )
    whole, ladder = bench_command(options, Console(quiet=True))
    assert isinstance(whole, record.LatencyRecord)
    assert whole.agreement["lerobot"]["max_abs"] < TOLERANCE
    assert whole.against["lerobot"] > 0
    assert isinstance(ladder, record.LadderRecord)
    assert [rung.name for rung in ladder.rungs] == [
        "official, eager",
        "plan, eager, plain torch",
        "engine, nothing captured",
    ]
    assert ladder.rungs[0].launches > 0


def test_parity_of_a_checkpoint_without_a_tokenizer(tmp_path, monkeypatch):
    """Most have none: both sides take the one that is named, and a file that LeRobot cannot read is told."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory, apart = tmp_path / "checkpoint", tmp_path / "tokenizer"
    shutil.copytree(ROOT / "examples/checkpoints/tiny-pi05", directory)
    apart.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).rename(apart / name)
    named = ["parity", str(directory), "--device", "cpu", "--tokenizer"]
    done = CliRunner().invoke(app, [*named, str(apart / "tokenizer.json"), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with pytest.raises(InnerloopError, match="reads a tokenizer.json only"):
        open_official(directory, "cpu", "float32", tokenizer=tmp_path / "paligemma.model")
