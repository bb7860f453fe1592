"""A PEFT adapter from its directory to robot units: through the API and the command line, beside its base or apart."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loaded_policies import CHECKPOINTS, ROOT
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import innerloop
from innerloop.cli import app

RANK, ALPHA = 4, 6.0


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Path]:
    """An adapter of both decoders' queries and one MLP, and the directory that merging it by hand gives."""
    base = load_file(CHECKPOINTS["pi05"] / "model.safetensors")
    chosen = [n for n in sorted(base) if n.endswith(("self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"))]
    chosen = [n for n in chosen if "vision_tower" not in n]
    generator = torch.Generator().manual_seed(5)
    parts: dict[str, torch.Tensor] = {}
    for name in chosen:
        rows, columns = base[name].shape
        down, up = (torch.randn(s, generator=generator) * 0.1 for s in ((RANK, columns), (rows, RANK)))
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        base[name] = base[name] + ALPHA / RANK * (up @ down)
    directory = tmp_path / "adapter"
    directory.mkdir()
    save_file(parts, directory / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "up_proj"]}
    said["base_model_name_or_path"] = str(CHECKPOINTS["pi05"].resolve())
    (directory / "adapter_config.json").write_text(json.dumps(said))
    merged = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "merged"))
    save_file(base, merged / "model.safetensors")
    return directory, merged


def actions(arguments: list[str]) -> list[list[float]]:
    """What `innerloop run` prints for a checkpoint and further options."""
    frames = [f"--image={name}={ROOT}/examples/frames/0-{name}.png" for name in ("base", "wrist")]
    asked = ["--state", "1,2,3,4,5,6,7,8", "--prompt", "pick up", "--seed", "1", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, ["run", *arguments, *frames, *asked])
    assert done.exit_code == 0, done.output
    found: list[list[float]] = json.loads(done.stdout.strip().splitlines()[-1])["actions"]
    return found


def beside(directory: Path, tmp_path: Path) -> list[str]:
    """Base and adapter in one directory."""
    both = shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "both")
    for file in directory.iterdir():
        shutil.copy(file, both)
    return [str(both)]


@pytest.mark.parametrize(
    "given",
    [
        lambda adapter, _: [str(CHECKPOINTS["pi05"]), "--adapter", str(adapter)],
        lambda adapter, _: [str(adapter)],
        beside,
    ],
    ids=["option", "alone", "beside"],
)
def test_a_lora_directory_gives_the_actions_of_the_merged_one(
    adapter: tuple[Path, Path], tmp_path: Path, given: Callable[[Path, Path], list[str]]
) -> None:
    directory, merged = adapter
    found = actions(given(directory, tmp_path))
    np.testing.assert_allclose(found, actions([str(merged)]), atol=1e-5)
    assert not np.allclose(found, actions([str(CHECKPOINTS["pi05"])]), atol=1e-3)


def test_an_adapter_changes_the_fingerprint_and_shows_in_the_account(adapter: tuple[Path, Path]) -> None:
    base = innerloop.load(CHECKPOINTS["pi05"], device="cpu")
    adapted = innerloop.load(CHECKPOINTS["pi05"], device="cpu", adapter=adapter[0])
    assert adapted.fingerprint != base.fingerprint
    assert adapted.account is not None
    assert f"{len(adapted.account.merged)} merged" in str(adapted.account)
    assert len(adapted.account.merged) > 0
    base.close()
    adapted.close()
