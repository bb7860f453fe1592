"""Tiny random starVLA run directories, names and shapes as the official modules have them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from recipes.tiny import qwen
from recipes.tiny.qwen import Shapes, affine

VLM = "Qwen3-VL-tiny"
TEMPLATE = "Your task is {instruction}. Identify the key objects in it."
DIMS, STATE = 7, 5
FAST = {"scale": 10, "vocab_size": qwen.ROBOT_ACTIONS, "min_token": -64}


@dataclass(frozen=True)
class Run:
    """One run: framework, chunk, and what its config.yaml overrides."""

    framework: str
    chunk: int
    seed: int
    action: dict[str, Any] = field(default_factory=dict)
    dit: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "pi3": Run(
        "QwenPI_v3", 6, 11, dit={"action_dit_hidden_dim": 32}, data={"include_state": True, "CoT_prompt": TEMPLATE}
    ),
    "pi3-interleaved": Run(
        "QwenPI_v3",
        4,
        12,
        action={"num_inference_timesteps": 3, "add_pos_embed": False},
        dit={"action_dit_hidden_dim": 32, "use_canonical_forward": True},
        data={"obs_image_size": None},
    ),
    "pi": Run("QwenPI", 5, 13, data={"include_state": True}, own={"cameras": ["front"]}),
    "gr00t": Run(
        "QwenGR00T",
        5,
        14,
        action={"action_model_type": "DiT-B", "hidden_size": 40, "num_inference_timesteps": 5},
        dit={"num_layers": 3, "output_dim": 40},
        data={"include_state": True, "CoT_prompt": TEMPLATE},
    ),
    "oft": Run("QwenOFT", 5, 15, data={"include_state": True, "CoT_prompt": TEMPLATE}),
    "fast": Run("QwenFast", 4, 16, own={"cameras": ["front"]}),
}


def configuration(run: Run) -> dict[str, Any]:
    """config.yaml as plain data."""
    dit = {"dropout": 0.2, "final_dropout": True, "norm_type": "ada_norm", "positional_embeddings": None}
    action = {
        "action_dim": DIMS,
        "state_dim": STATE,
        "action_horizon": run.chunk,
        "num_inference_timesteps": 4,
        "num_target_vision_tokens": 6,
        "max_seq_len": 16,
        "noise_beta_alpha": 1.5,
        "noise_beta_beta": 1.0,
        "diffusion_model_cfg": {**dit, "attention_head_dim": 16, **run.dit},
        **run.action,
    }
    if run.framework == "QwenGR00T":
        del action["diffusion_model_cfg"]["attention_head_dim"]
    data = {"obs_image_size": [24, 40], "include_state": False, "data_mix": "made_up", **run.data}
    return {
        "framework": {"name": run.framework, "qwenvl": {"base_vlm": VLM}, "action_model": action},
        "datasets": {"vla_data": data},
        "trainer": {"pretrained_checkpoint": None},
        "innerloop": {"cameras": ["front", "wrist"], "action": "q99", "state": "q99", **run.own},
    }


def statistics(seed: int) -> dict[str, Any]:
    """dataset_statistics.json: the last action dimension is a switch."""
    drawn = qwen.tensors({"action": (1, DIMS), "state": (1, STATE), "spread": (1, DIMS)}, seed)
    low, state, spread = (drawn[name][0].tolist() for name in ("action", "state", "spread"))
    high = [a + 0.5 + abs(b) for a, b in zip(low, spread, strict=True)]
    mask = [True] * (DIMS - 1) + [False]
    return {
        "made_up": {
            "action": {"q01": low, "q99": high, "min": low, "max": high, "mask": mask},
            "state": {"q01": state, "q99": [value + 1.5 for value in state]},
        }
    }


def shapes(run: Run) -> Shapes:
    """Tensors of the checkpoint, those that nothing reads included."""
    interface, width = "qwen_vl_interface.model.", qwen.TEXT["hidden_size"]
    found = {f"{interface}{name}": shape for name, shape in qwen.shapes("qwen3_vl").items()}
    found[f"{interface}lm_head.weight"] = found[f"{interface}model.language_model.embed_tokens.weight"]
    if run.framework == "QwenOFT":
        return found | _regression(width)
    if run.framework == "QwenFast":
        return found
    layers = qwen.TEXT["num_hidden_layers"]
    if run.framework == "QwenGR00T":
        hidden, out = run.action["hidden_size"], run.dit["output_dim"]
        return found | _dit(768, width, run.dit["num_layers"], True, out) | _flow(run, 768, out, hidden)
    inner = run.dit.get("action_dit_hidden_dim", width)
    interleaved = run.framework == "QwenPI" or run.dit.get("use_canonical_forward", False)
    found |= _dit(inner, inner, layers, interleaved, 26) | _flow(run, inner, inner, 1024)
    if inner != width:
        for i in range(layers):
            found |= affine(f"project_layers.{i}.0", width) | affine(f"project_layers.{i}.1", inner, width)
    return found


def write(directory: Path, run: Run) -> Path:
    """A run directory with its Qwen3-VL's description inside it."""
    vlm = directory / VLM
    vlm.mkdir(parents=True, exist_ok=True)
    (vlm / "config.json").write_text(json.dumps(qwen.config("qwen3_vl")))
    (vlm / "tokenizer.json").write_text(qwen.tokenizer_json())
    (vlm / "preprocessor_config.json").write_text(json.dumps(qwen.IMAGES))
    (directory / "config.yaml").write_text(json.dumps(configuration(run), indent=1))  # JSON is YAML
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics(run.seed)))
    if run.framework == "QwenFast":
        qwen_fast = directory / "fast"
        qwen_fast.mkdir(exist_ok=True)
        (qwen_fast / "tokenizer.json").write_text(fast_json())
        (qwen_fast / "processor_config.json").write_text(json.dumps(FAST))
    (directory / "checkpoints").mkdir(exist_ok=True)
    drawn = tensors(run)
    save_file(drawn, directory / "checkpoints" / "steps_10_model.safetensors")
    return directory


def tensors(run: Run) -> dict[str, Any]:
    """The checkpoint's tensors; the language head is the embedding."""
    drawn = qwen.tensors(shapes(run), run.seed)
    embedding = "qwen_vl_interface.model.model.language_model.embed_tokens.weight"
    return drawn | {"qwen_vl_interface.model.lm_head.weight": drawn[embedding].copy()}


def fast_json() -> str:
    """A FAST tokenizer over coefficients -31..32: a character each, and two merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = [chr(33 + i) for i in range(qwen.ROBOT_ACTIONS - 2)]
    tokens = [*alphabet, "AA", "AAA"]
    merges = [("A", "A"), ("AA", "A")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _dit(width: int, context: int, depth: int, interleaved: bool, out: int) -> Shapes:
    base = "action_model.model."
    found: Shapes = {}
    found |= affine(f"{base}timestep_encoder.timestep_embedder.linear_1", width, 256)
    found |= affine(f"{base}timestep_encoder.timestep_embedder.linear_2", width, width)
    found |= affine(f"{base}proj_out_1", 2 * width, width) | affine(f"{base}proj_out_2", out, width)
    for i in range(depth):
        block, read = f"{base}transformer_blocks.{i}.", width if interleaved and i % 2 else context
        found |= affine(f"{block}norm1.linear", 2 * width, width)
        found |= affine(f"{block}attn1.to_q", width, width) | affine(f"{block}attn1.to_out.0", width, width)
        found |= affine(f"{block}attn1.to_k", width, read) | affine(f"{block}attn1.to_v", width, read)
        found |= affine(f"{block}ff.net.0.proj", 4 * width, width) | affine(f"{block}ff.net.2", width, 4 * width)
    return found


def _flow(run: Run, width: int, out: int, hidden: int) -> Shapes:
    base = "action_model."
    found: Shapes = {f"{base}future_tokens.weight": (6, width)}
    if run.action.get("add_pos_embed", True):
        found[f"{base}position_embedding.weight"] = (16, width)
    found |= affine(f"{base}action_encoder.layer1", width, DIMS)
    found |= affine(f"{base}action_encoder.layer2", width, 2 * width)
    found |= affine(f"{base}action_encoder.layer3", width, width)
    found |= affine(f"{base}action_decoder.layer1", hidden, out) | affine(f"{base}action_decoder.layer2", DIMS, hidden)
    found |= affine(f"{base}state_encoder.layer1", hidden, STATE)
    return found | affine(f"{base}state_encoder.layer2", width, hidden)


def _regression(width: int) -> Shapes:
    base, wide = "action_model.model.", 2 * width
    found = affine(f"{base}layer_norm1", width) | affine(f"{base}fc1", wide, width)
    for i in range(2):
        block = f"{base}mlp_resnet_blocks.{i}.ffn."
        found |= affine(f"{block}0", wide) | affine(f"{block}1", wide, wide)
    return found | affine(f"{base}layer_norm2", wide) | affine(f"{base}fc2", DIMS, wide)


@dataclass(frozen=True)
class Case:
    """One observation: sizes of its images (height, width), a prompt, a seed."""

    images: tuple[tuple[int, int], ...]
    prompt: str
    seed: int


_TWO = (
    Case(((40, 24), (40, 24)), "pick up the red block", 1),
    Case(((33, 57), (20, 90)), "", 2),
    Case(((64, 48), (40, 24)), "put the user there, then in the thing \u2014 \u6a5f\u68b0 twice", 3),
)
_ONE = (Case(((40, 24),), "open the drawer", 4), Case(((51, 30),), "in", 5))
CASES: dict[str, tuple[Case, ...]] = {
    "pi3": _TWO,
    # no first resize: grids differ between images and cases
    "pi3-interleaved": (Case(((16, 16), (48, 24)), "reach in", 6), Case(((21, 83), (64, 64)), "the user", 7)),
    "pi": _ONE,
    "gr00t": _TWO[:2],
    "oft": _TWO,
    "fast": _ONE,
}


def observation(run: Run, case: Case) -> dict[str, Any]:
    """images by camera, raw state float32 [STATE], prompt; and the state as starVLA's loader normalises it by q99."""
    cameras = configuration(run)["innerloop"]["cameras"]
    images = {
        n: qwen.picture(10 * case.seed + i, *size) for i, (n, size) in enumerate(zip(cameras, case.images, strict=True))
    }
    stats = statistics(run.seed)["made_up"]["state"]
    low, high = (np.asarray(stats[name], np.float32) for name in ("q01", "q99"))
    state = np.random.default_rng(case.seed).uniform(low - 0.4, high + 0.4).astype(np.float32)
    normalized = 2 * (state - low) / (high - low) - 1
    return {"images": images, "state": state, "prompt": case.prompt, "normalized_state": normalized}


def noise(run: Run, case: Case) -> np.ndarray:
    """float32 [chunk, DIMS]."""
    drawn: np.ndarray = np.random.default_rng([case.seed, 1]).standard_normal((run.chunk, DIMS)).astype(np.float32)
    return drawn
