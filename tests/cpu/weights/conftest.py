"""Small checkpoint directories, and a proof that reading left them alone."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from directories import ACTION, STATE, contents, norm_stats, write_json
from safetensors.torch import save_file

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Three tensors under openpi's names; values are exact in bfloat16."""
    return {
        "paligemma_with_expert.paligemma.lm_head.weight": torch.arange(12.0).reshape(4, 3),
        "action_in_proj.weight": torch.arange(6.0).reshape(3, 2) - 2,
        "time_mlp_in.weight": torch.arange(9.0).reshape(3, 3) * 0.5,
    }


@pytest.fixture
def openpi(tmp_path: Path, tensors: Tensors) -> Path:
    """An openpi PyTorch directory with one set of statistics."""
    directory = tmp_path / "openpi"
    directory.mkdir()
    save_file(dict(tensors), directory / "model.safetensors")
    write_json(directory / "assets" / "lab" / "arm" / "norm_stats.json", norm_stats())
    return directory


@pytest.fixture
def lerobot(tmp_path: Path, tensors: Tensors) -> Path:
    """A LeRobot directory: config, weights behind `model.`, both processors with their normaliser tensors."""
    directory = tmp_path / "lerobot"
    directory.mkdir()
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    write_json(directory / "config.json", {"type": "pi05", "chunk_size": 4})
    (directory / "tokenizer.json").write_text("{}")
    for kind, step in (("preprocessor", "normalizer_processor"), ("postprocessor", "unnormalizer_processor")):
        file = f"policy_{kind}_step_0_{step}.safetensors"
        steps = [
            {"registry_name": step, "config": {"eps": 1e-8}, "state_file": file},
            {"registry_name": "device_processor"},
        ]
        write_json(directory / f"policy_{kind}.json", {"name": f"policy_{kind}", "steps": steps})
        state = {"observation.state.mean": torch.zeros(STATE), "action.std": torch.ones(ACTION)}
        save_file(state, directory / file)
    return directory


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Call it when the files are ready; at the end of the test they must be what they were."""
    before: list[dict[str, str]] = []
    yield lambda: before.append(contents(tmp_path))
    assert before
    assert contents(tmp_path) == before[0]
