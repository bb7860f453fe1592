"""One policy in every layout that a checkpoint comes in: the same actions, from the directory to robot units; what
is missing or contradicts is named before anything is allocated."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_policies import CHECKPOINTS, ROOT
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import innerloop
from innerloop import engine
from innerloop.blocks.flow_config import OPENPI_CAMERAS
from innerloop.cli import app
from innerloop.contract import CheckpointError, ObservationError
from innerloop.process import ActionLimits, Edge

Tensors = dict[str, torch.Tensor]
ORBAX = ROOT / "tests/golden/orbax"
ORBAX_SIZES = {  # recipes/orbax/make.py
    "vision": {"hidden_size": 12, "intermediate_size": 20, "layers": 2, "heads": 3, "patch_size": 2},
    "language": {"width": 16, "depth": 2, "mlp_dim": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab_size": 40},
    "expert": {"width": 12, "depth": 2, "mlp_dim": 20, "heads": 2, "kv_heads": 1, "head_dim": 8},
}


def decide(directory: Path, state: int, size: int = 224, **options: Any) -> innerloop.Chunk:
    """One decision with three frames of the model's own size."""
    rng = np.random.default_rng(0)
    observation = {
        "images": {name: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for name in OPENPI_CAMERAS},
        "state": rng.uniform(-1, 1, state).astype(np.float32),
        "prompt": "pick up the red block",
    }
    policy = innerloop.load(directory, device="cpu", **options)
    chunk = policy.infer(observation, seed=3)
    policy.close()
    return chunk


def write_json(path: Path, value: Any) -> None:
    """A JSON file, with the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def lerobot(tmp_path: Path, family: str) -> Path:
    """The tiny LeRobot directory, its cameras named as openpi names them."""
    directory = Path(shutil.copytree(CHECKPOINTS[family], tmp_path / "lerobot"))
    config = json.loads((directory / "config.json").read_text())
    kept = {n: f for n, f in config["input_features"].items() if f["type"] != "VISUAL"}
    visual = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in OPENPI_CAMERAS}
    openpi_steps = {"num_inference_steps": 10}
    write_json(directory / "config.json", {**config, **openpi_steps, "input_features": {**visual, **kept}})
    return directory


@pytest.fixture
def openpi(tmp_path: Path, lerobot: Path) -> Path:
    """The same policy as openpi's converter writes one: bare tensor names, norm_stats.json, a short config.json."""
    directory, config = tmp_path / "openpi", json.loads((lerobot / "config.json").read_text())
    directory.mkdir()
    tensors = load_file(lerobot / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, directory / "model.safetensors")
    stored = load_file(next(lerobot.glob("policy_preprocessor_step_*_normalizer_processor.safetensors")))
    stats = {
        ours: {
            key.rpartition(".")[2]: value.tolist()
            for key, value in stored.items()
            if key.startswith(f"{theirs}.") and key.rpartition(".")[2] in ("mean", "std", "q01", "q99")
        }
        for ours, theirs in (("state", "observation.state"), ("actions", "action"))
    }
    write_json(directory / "assets" / "lab" / "norm_stats.json", {"norm_stats": stats})
    said = {"action_dim": 32, "action_horizon": config["chunk_size"], "max_token_len": config["tokenizer_max_length"]}
    own = {"innerloop_architecture": config["innerloop_architecture"]}
    write_json(directory / "config.json", {**said, "image_resolution": config["image_resolution"], **own})
    shutil.copy(lerobot / "tokenizer.json", directory)
    return directory


@pytest.mark.parametrize("family", sorted(CHECKPOINTS))
def test_openpi_pytorch_directory_gives_the_lerobot_directorys_actions(lerobot: Path, openpi: Path) -> None:
    config = json.loads((lerobot / "config.json").read_text())
    width, size = config["input_features"]["observation.state"]["shape"][0], config["image_resolution"][0]
    ours, theirs = decide(openpi, width, size), decide(lerobot, width, size)
    assert theirs.receipt is not None
    assert ours.receipt is not None
    assert ours.receipt.prompt_tokens == theirs.receipt.prompt_tokens
    assert ours.receipt.statistics == "lab"
    assert ours.actions.shape == theirs.actions.shape
    np.testing.assert_allclose(ours.normalized, theirs.normalized, atol=1e-4)  # pi0's state is divided by another eps
    np.testing.assert_allclose(ours.actions, theirs.actions, atol=1e-4)


@pytest.mark.parametrize("family", ["pi05"])
def test_openpi_pytorch_directory_on_the_command_line(openpi: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(openpi), "--json"])
    assert shown.exit_code == 0, shown.output
    details = json.loads(shown.stdout)["details"]
    assert (details["layout"], details["chunk"]) == ("openpi", 10)
    assert tuple(details["cameras"]) == OPENPI_CAMERAS


@pytest.mark.parametrize("family", ["pi05"])
def test_an_openpi_directory_is_benchmarked_with_what_it_does_not_say(openpi: Path, tmp_path: Path) -> None:
    config = json.loads((openpi / "config.json").read_text())
    del config["action_horizon"]
    write_json(openpi / "config.json", config)
    edge, asked = tmp_path / "edge.json", ["bench", str(openpi), "--device", "cpu", "--ticks", "4"]
    write_json(edge, {"absent": [OPENPI_CAMERAS[-1]]})
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1
    assert "to bench --chunk" in str(refused.exception)
    place = tmp_path / "record.json"
    done = CliRunner().invoke(app, [*asked, "--chunk", "6", "--edge", str(edge), "--json", str(place)])
    assert done.exit_code == 0, done.output
    record = json.loads(place.read_text())
    assert record["chunk"] == 6
    assert record["command"] == "innerloop bench openpi --chunk 6 --device cpu --ticks 4 --edge edge.json"


@pytest.mark.parametrize("family", ["pi05"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action_dim": 14}, r"action_in_proj.*\[32, 32\].*\[32, 14\] because the config says .*max_action_dim = 14"),
        ({"action_horizon": 0}, "action_horizon is 0"),
        ({"image_resolution": [224, 336]}, "square"),
        ({"innerloop_architecture": None}, r"\b48\b.*\b1152\b|\b1152\b.*\b48\b"),
    ],
)
def test_an_openpi_config_that_contradicts_is_named(openpi: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((openpi / "config.json").read_text())
    write_json(openpi / "config.json", {**config, **change})
    said: list[str] = []
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        innerloop.load(openpi, device="cpu", announce=said.append)
    assert not said, "before the memory plan, so before anything is allocated"
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        engine.sketch(openpi)


@pytest.mark.parametrize("family", ["pi05"])
def test_statistics_of_an_openpi_directory_are_there_and_of_its_mode(openpi: Path) -> None:
    path = openpi / "assets" / "lab" / "norm_stats.json"
    stats = json.loads(path.read_text())["norm_stats"]
    less = {name: {k: v for k, v in s.items() if not k.startswith("q")} for name, s in stats.items()}
    write_json(path, {"norm_stats": less})
    with pytest.raises(CheckpointError, match="'observation.state' is normalised by QUANTILES.*q01, q99.*mean, std"):
        innerloop.load(openpi, device="cpu")
    renamed = {"state": stats["state"], "arm_action": stats["actions"]}
    write_json(path, {"norm_stats": renamed})
    with pytest.raises(CheckpointError, match="no statistics for 'action'.*arm_action, observation.state"):
        innerloop.load(openpi, device="cpu")
    write_json(openpi / "assets" / "home" / "norm_stats.json", {"norm_stats": stats})
    with pytest.raises(CheckpointError, match=r"2 sets of statistics \(home, lab\).*assets=NAME"):
        innerloop.load(openpi, device="cpu")
    chosen = decide(openpi, 8, assets="home").receipt
    assert chosen is not None
    assert chosen.statistics == "home"
    shutil.rmtree(openpi / "assets")
    with pytest.raises(CheckpointError, match="no statistics for 'observation.state'.*nothing"):
        innerloop.load(openpi, device="cpu")


def words(file: Path) -> None:
    """A tokenizer of fewer than 40 words."""
    listed = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "Task",
        "State",
        "Action",
        "pick",
        "up",
        "red",
        "block",
        *"0123456789",
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(listed)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]|[A-Za-z]+|\S"), "isolated")
    tokenizer.save(str(file))


def complete(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """What openpi's training leaves beside the parameters, and the sizes of recipes/orbax/make.py."""
    spread = {"mean": [0.1] * 5, "std": [2.0] * 5, "q01": [-3.0] * 5, "q99": [2.0] * 5}
    write_json(directory / "assets" / "arm" / "norm_stats.json", {"norm_stats": {"state": spread, "actions": spread}})
    said = {"action_dim": 5, "action_horizon": 4, "max_token_len": 60, "image_resolution": [4, 4]}
    write_json(directory / "config.json", {**said, "innerloop_architecture": ORBAX_SIZES, **(config or {})})
    words(directory / "tokenizer.json")
    return directory


def pytorch(directory: Path, tensors: Tensors) -> Path:
    """An openpi PyTorch directory of these tensors."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return complete(directory)


def test_orbax_directory_gives_the_actions_of_openpis_converted_one(tmp_path: Path) -> None:
    jax = complete(Path(shutil.copytree(ORBAX / "pi05", tmp_path / "jax")))
    converted = pytorch(tmp_path / "torch", load_file(ORBAX / "pi05.safetensors"))
    ours, theirs = decide(jax, 5, size=4), decide(converted, 5, size=4)
    assert ours.actions.shape == (4, 5)
    assert ours.actions.tobytes() == theirs.actions.tobytes()
    assert np.ptp(ours.actions) > 0.1
    whole = innerloop.load(jax, device="cpu")
    assert whole.account is not None
    assert "merged" in str(whole.account)
    whole.close()


def test_orbax_directory_with_lora_parameters_is_merged(tmp_path: Path) -> None:
    adapted = complete(Path(shutil.copytree(ORBAX / "lora", tmp_path / "lora")))
    plain = pytorch(tmp_path / "torch", load_file(ORBAX / "pi05.safetensors"))  # the same base, from the same seed
    policy = innerloop.load(adapted, device="cpu")
    assert policy.account is not None
    assert policy.account.merged
    policy.close()
    assert not np.array_equal(decide(adapted, 5, size=4).actions, decide(plain, 5, size=4).actions)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"action_dim": 7}, "action_in_proj"),
        ({"innerloop_architecture": {**ORBAX_SIZES, "language": {**ORBAX_SIZES["language"], "width": 24}}}, r"\b24\b"),
        ({"innerloop_architecture": {**ORBAX_SIZES, "language": {**ORBAX_SIZES["language"], "mlp_dim": 9}}}, r"\b9\b"),
        ({"image_resolution": [8, 8]}, r"position"),
    ],
)
def test_an_orbax_save_that_contradicts_its_config(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    directory = complete(Path(shutil.copytree(ORBAX / "pi05", tmp_path / "jax")), change)
    with pytest.raises(CheckpointError, match=f"(?s){named}"):
        innerloop.load(directory, device="cpu")


@pytest.mark.parametrize("family", ["pi05"])
def test_an_openpi_robot_with_one_camera_declares_the_others_absent(openpi: Path) -> None:
    policy = innerloop.load(openpi, device="cpu", edge=Edge(rename={"front": OPENPI_CAMERAS[0]}))
    frame = np.full((224, 224, 3), 90, np.uint8)
    absent = dict.fromkeys(OPENPI_CAMERAS[1:])
    rest = {"state": np.zeros(8), "prompt": "push"}
    chunk = policy.infer({"images": {"front": frame, **absent}, **rest}, seed=0)
    policy.close()
    assert chunk.actions.shape == (10, 7)
    once = innerloop.load(openpi, device="cpu", edge=Edge(absent=OPENPI_CAMERAS[1:]))
    assert once.metadata["cameras"] == [OPENPI_CAMERAS[0]]  # what a server's self-check and a bench send
    declared = once.infer({"images": {OPENPI_CAMERAS[0]: frame}, **rest}, seed=0)
    once.close()
    assert declared.actions.tobytes() == chunk.actions.tobytes()
    with pytest.raises(ObservationError, match="absent names 'left'.*its cameras are base_0_rgb"):
        innerloop.load(openpi, device="cpu", edge=Edge(absent=["left"]))
    with pytest.raises(ObservationError, match="every camera is declared absent"):
        innerloop.load(openpi, device="cpu", edge=Edge(absent=OPENPI_CAMERAS))


def test_slots_that_no_robot_fills_are_asked_of_nobody(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "c"))
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", {**config, "empty_cameras": 1})
    policy = innerloop.load(directory, device="cpu")
    assert policy.cameras == ("base", "wrist")
    images = {name: np.zeros((48, 64, 3), np.uint8) for name in policy.metadata["cameras"]}
    assert policy.infer({"images": images, "state": np.zeros(8), "prompt": "push"}, seed=0).actions.shape == (10, 7)
    policy.close()


def historic(name: str) -> str:
    """A tensor's name as transformers before 4.52 nested PaliGemma's parts."""
    for now, then in (
        ("paligemma.model.language_model.", "paligemma.language_model.model."),
        ("paligemma.lm_head.", "paligemma.language_model.lm_head."),
        ("paligemma.model.vision_tower.", "paligemma.vision_tower."),
        ("paligemma.model.multi_modal_projector.", "paligemma.multi_modal_projector."),
    ):
        name = name.replace(now, then)
    return name


@pytest.mark.parametrize("family", sorted(CHECKPOINTS))
def test_renamed_keys_and_tied_embeddings_give_the_same_actions(lerobot: Path, tmp_path: Path) -> None:
    config = json.loads((lerobot / "config.json").read_text())
    width, size = config["input_features"]["observation.state"]["shape"][0], config["image_resolution"][0]
    expected = decide(lerobot, width, size).actions
    tensors = load_file(lerobot / "model.safetensors")
    embedding = next(name for name in tensors if name.endswith("language_model.embed_tokens.weight"))
    tied = {name: tensor for name, tensor in tensors.items() if name != embedding}
    tied[next(name for name in tied if name.endswith("paligemma.lm_head.weight"))] = tensors[embedding]
    older = Path(shutil.copytree(lerobot, tmp_path / "older"))
    save_file({historic(name): tensor for name, tensor in tied.items()}, older / "model.safetensors")
    assert decide(older, width, size).actions.tobytes() == expected.tobytes()
    policy = innerloop.load(older, device="cpu")
    assert policy.account is not None
    assert len(policy.account.tied) == 1
    policy.close()


@pytest.mark.parametrize("family", ["pi05"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_callers_number_types_do_not_matter(openpi: Path, precision: str) -> None:
    """States and noise of any float width, and integers where they are whole."""
    policy = innerloop.load(openpi, device="cpu", precision=precision)
    frame = np.full((224, 224, 3), 90, np.uint8)
    noise = policy.processor.noise(seed=1).astype(np.float16)
    found = {
        policy.infer(
            {"images": dict.fromkeys(OPENPI_CAMERAS, frame), "state": state, "prompt": "push"}, noise=noise.astype(kind)
        ).actions.tobytes()
        for state in (np.ones(8, np.float32), np.ones(8), np.ones(8, np.float16), np.ones(8, np.int64), [1.0] * 8)
        for kind in (np.float16, np.float32, np.float64)
    }
    policy.close()
    assert len(found) == 1


@pytest.mark.parametrize("family", ["pi05"])
def test_missing_and_stale_tensors_are_named_before_anything_is_allocated(lerobot: Path) -> None:
    tensors = load_file(lerobot / "model.safetensors")
    gone = "model.action_out_proj.bias"
    kept = {name: tensor for name, tensor in tensors.items() if name != gone}
    kept["paligemma_with_expert.paligemma.lm_head.weight"] = tensors[
        "model.paligemma_with_expert.paligemma.lm_head.weight"
    ].clone()
    save_file(kept, lerobot / "model.safetensors")
    said: list[str] = []
    with pytest.raises(CheckpointError, match="missing: 'action_out_proj.bias'") as error:
        innerloop.load(lerobot, device="cpu", announce=said.append)
    assert "are the same tensor" in str(error.value)
    assert "one is stale" in str(error.value)
    assert not said


@pytest.mark.parametrize("family", ["pi05"])
def test_the_fingerprint_knows_what_only_the_caller_said_and_the_tokenizer(openpi: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(openpi, tmp_path / "elsewhere"))
    other = tmp_path / "tokenizer.json"
    other.write_text((openpi / "tokenizer.json").read_text() + "\n")

    def mark(directory: Path, **said: Any) -> str:
        policy = innerloop.load(directory, device="cpu", edge=Edge(**said))
        policy.close()
        return policy.fingerprint

    plain = mark(openpi)
    assert mark(moved) == mark(openpi, rename={"front": OPENPI_CAMERAS[0]}) == plain
    limits = ActionLimits(step=np.full(7, 0.1))
    said = ({"state_dim": 4}, {"relative": [True] + [False] * 6}, {"limits": limits}, {"tokenizer": other})
    assert len({plain, *(mark(openpi, **one) for one in said)}) == 5
