"""Tiny random GR00T N1.7 checkpoints in Isaac-GR00T's layout: the same bytes from a seed wherever this is run.

Names and shapes are those of the official modules (NVIDIA/Isaac-GR00T, LeRobot 0.6.1), written out by hand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from recipes.tiny import qwen
from recipes.tiny.qwen import Shapes, affine

EMBODIMENTS = 4
LAYERS = 4  # of the language model that are run, one more than DeepStack reaches
ABOVE = 1  # more in the files, as if a backbone had not been cut
WIDTH, DIT, HIDDEN = qwen.TEXT["hidden_size"], 48, 40
STATE, ACTION, PLACES = 26, 24, 16
LIBERO, DROID = "libero_sim", "oxe_droid_relative_eef_relative_joint"
BACKBONE = (
    "text_config",
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
IDS = {LIBERO: 2, DROID: 3}


def config(chunk: int = 8, steps: int = 4, blocks: int = 8) -> dict[str, Any]:
    """config.json; the backbone's own sizes, which GR00T's files do not hold, under innerloop's key."""
    ours = qwen.config("qwen3_vl")
    ours["text_config"]["num_hidden_layers"] = LAYERS + ABOVE
    return {
        "model_type": "Gr00tN1d7",
        "architectures": ["Gr00tN1d7"],
        "model_name": "nvidia/Cosmos-Reason2-2B",
        "dtype": "float32",
        "select_layer": LAYERS,
        "backbone_embedding_dim": WIDTH,
        "hidden_size": HIDDEN,
        "input_embedding_dim": DIT,
        "max_state_dim": STATE,
        "max_action_dim": ACTION,
        "action_horizon": chunk,
        "max_seq_len": PLACES,
        "max_num_embodiments": EMBODIMENTS,
        "num_inference_timesteps": steps,
        "num_timestep_buckets": 1000,
        "attend_text_every_n_blocks": 2,
        "use_alternate_vl_dit": True,
        "use_vlln": True,
        "add_pos_embed": True,
        "state_history_length": 1,
        "use_percentiles": True,
        "diffusion_model_cfg": {
            "positional_embeddings": None,
            "num_layers": blocks,
            "num_attention_heads": 3,
            "attention_head_dim": DIT // 3,
            "norm_type": "ada_norm",
            "dropout": 0.2,
            "final_dropout": True,
            "output_dim": HIDDEN,
            "interleave_self_attention": True,
        },
        "vl_self_attention_cfg": {
            "positional_embeddings": None,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": WIDTH // 4,
            "dropout": 0.2,
            "final_dropout": True,
        },
        "innerloop_architecture": {name: ours[name] for name in BACKBONE},
    }


def shapes(blocks: int = 8) -> Shapes:
    """Every tensor of a checkpoint."""
    backbone, head = "backbone.model.model.", "action_head."
    found = qwen.vision_shapes(f"{backbone}visual.")
    language, last = f"{backbone}language_model.", f"layers.{LAYERS - 1}."
    spoken = qwen.language_shapes(language)
    above = {n.replace(last, f"layers.{LAYERS}."): shape for n, shape in spoken.items() if last in n}
    found |= spoken | above
    for name, inner, out in (
        ("state_encoder.layer1", STATE, HIDDEN),
        ("state_encoder.layer2", HIDDEN, DIT),
        ("action_encoder.W1", ACTION, DIT),
        ("action_encoder.W2", 2 * DIT, DIT),
        ("action_encoder.W3", DIT, DIT),
        ("action_decoder.layer1", HIDDEN, HIDDEN),
        ("action_decoder.layer2", HIDDEN, ACTION),
    ):
        found |= {f"{head}{name}.W": (EMBODIMENTS, inner, out), f"{head}{name}.b": (EMBODIMENTS, out)}
    found |= affine(f"{head}vlln", WIDTH) | {f"{head}position_embedding.weight": (PLACES, DIT)}
    for i in range(2):
        found |= _block(f"{head}vl_self_attention.transformer_blocks.{i}.", WIDTH, WIDTH)
        found |= affine(f"{head}vl_self_attention.transformer_blocks.{i}.norm1", WIDTH)
        found |= affine(f"{head}vl_self_attention.transformer_blocks.{i}.norm3", WIDTH)
    time = f"{head}model.timestep_encoder.timestep_embedder."
    found |= affine(f"{time}linear_1", DIT, 256) | affine(f"{time}linear_2", DIT, DIT)
    for i in range(blocks):
        block = f"{head}model.transformer_blocks.{i}."
        found |= _block(block, DIT, DIT if i % 2 else WIDTH) | affine(f"{block}norm1.linear", 2 * DIT, DIT)
    return found | affine(f"{head}model.proj_out_1", 2 * DIT, DIT) | affine(f"{head}model.proj_out_2", HIDDEN, DIT)


def _block(name: str, width: int, context: int) -> Shapes:
    found: Shapes = {}
    for part, inner in (("q", width), ("k", context), ("v", context)):
        found |= affine(f"{name}attn1.to_{part}", width, inner)
    found |= affine(f"{name}attn1.to_out.0", width, width)
    return found | affine(f"{name}ff.net.0.proj", 4 * width, width) | affine(f"{name}ff.net.2", width, 4 * width)


def modalities() -> dict[str, Any]:
    """What each robot has: LIBERO absolute with a gripper, DROID a relative pose, relative joints and a gripper."""
    absolute = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    return {
        LIBERO: {
            "video": {"delta_indices": [0], "modality_keys": ["image", "wrist_image"]},
            "state": {"delta_indices": [0], "modality_keys": ["x", "gripper"]},
            "action": {
                "delta_indices": list(range(6)),
                "modality_keys": ["x", "gripper"],
                "action_configs": [absolute, absolute],
            },
            "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
        },
        DROID: {
            "video": {"delta_indices": [-15, 0], "modality_keys": ["exterior", "wrist"]},
            "state": {"delta_indices": [0], "modality_keys": ["eef_9d", "gripper_position", "joint_position"]},
            "action": {
                "delta_indices": list(range(8)),
                "modality_keys": ["eef_9d", "gripper_position", "joint_position"],
                "action_configs": [
                    {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": "eef_9d"},
                    absolute,
                    {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None},
                ],
            },
            "language": {"delta_indices": [0], "modality_keys": ["annotation.language.language_instruction"]},
        },
    }


WIDTHS = {"x": 6, "gripper": 2, "eef_9d": 9, "gripper_position": 1, "joint_position": 7}
ACTION_WIDTHS = {**WIDTHS, "gripper": 1}


def statistics(seed: int = 0) -> dict[str, Any]:
    """statistics.json: by robot, modality and key; relative joints have a row a step."""
    generator = np.random.default_rng([seed, 17])

    def drawn(*shape: int) -> dict[str, Any]:
        middle, reach = 0.2 * generator.standard_normal(shape), generator.uniform(0.5, 2.0, shape)
        rows = {"min": -reach, "q01": -0.9 * reach, "q99": 0.9 * reach, "max": reach}
        made = {name: (middle + row).tolist() for name, row in rows.items()}
        return {**made, "mean": middle.tolist(), "std": (0.5 * reach).tolist()}

    found: dict[str, Any] = {}
    for name, modality in modalities().items():
        keys = modality["state"]["modality_keys"]
        relative = {} if name == LIBERO else {"eef_9d": drawn(8, 9), "joint_position": drawn(8, 7)}
        found[name] = {
            "state": {key: drawn(WIDTHS[key]) for key in keys},
            "action": {key: drawn(ACTION_WIDTHS[key]) for key in keys},
            "relative_action": relative,
        }
    still = found[DROID]["state"]["joint_position"]
    for name in ("q01", "q99", "min", "max"):  # a joint that never moved
        still[name][2] = 0.25
    return found


def processor_config(**changes: Any) -> dict[str, Any]:
    """processor_config.json; `changes` replace entries of processor_kwargs."""
    kwargs = {
        "modality_configs": modalities(),
        "use_percentiles": True,
        "clip_outliers": True,
        "use_relative_action": True,
        "formalize_language": True,
        "image_crop_size": [21, 21],
        "image_target_size": [24, 24],
        "shortest_image_edge": 24,
        "crop_fraction": 0.95,
        "use_albumentations": True,
        "max_state_dim": STATE,
        "max_action_dim": ACTION,
        "max_action_horizon": 8,
    }
    return {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": {**kwargs, **changes}}


def write(
    directory: Path,
    seed: int = 0,
    chunk: int = 8,
    steps: int = 4,
    embodiments: Mapping[str, int] = IDS,
    **changes: Any,
) -> Path:
    """A checkpoint directory in two shards. embodiments: rows of the weights; `changes` replace processor_kwargs."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config(chunk, steps)),
        ("processor_config.json", processor_config(**changes)),
        ("statistics.json", statistics(seed)),
        ("embodiment_id.json", dict(embodiments)),
        ("preprocessor_config.json", qwen.IMAGES),
    ):
        (directory / name).write_text(json.dumps(content, indent=1))
    (directory / "tokenizer.json").write_text(qwen.tokenizer_json())
    drawn = tensors(seed)
    half = {name: f"model-0000{1 + (place % 2)}-of-00002.safetensors" for place, name in enumerate(sorted(drawn))}
    for file in sorted(set(half.values())):
        save_file({name: value for name, value in drawn.items() if half[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": half}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor drawn, none zero."""
    drawn = qwen.tensors(shapes(), seed)
    for name, value in drawn.items():
        if name.endswith(".W"):  # stored [E, in, out]
            drawn[name] = value * np.float32(np.sqrt(np.prod(value.shape[1:]) / value.shape[1]))
    return drawn


@dataclass(frozen=True)
class Case:
    """One observation of one robot; settings: changes of processor_kwargs; `present`: cameras that send a frame."""

    robot: str
    size: tuple[int, int]
    prompt: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    present: int = 2
    seed: int = 0


CASES = {
    "libero": Case(LIBERO, (48, 64), "Pick up the red block."),
    "droid": Case(DROID, (85, 50), "push it: now!", seed=1),
    "long": Case(DROID, (24, 24), "use the other hand, " * 6, {"use_percentiles": False}, seed=2),
    "bicubic": Case(LIBERO, (50, 70), "Pick up the cup", {"use_albumentations": False}, seed=4),
    "letterbox": Case(LIBERO, (30, 64), "", {"letter_box_transform": True, "crop_fraction": None}, present=1, seed=3),
}


def observation(case: Case) -> dict[str, Any]:
    """What the robot of a case sees; its state leaves the range of the statistics."""
    generator = np.random.default_rng(case.seed)
    modality = modalities()[case.robot]
    cameras = modality["video"]["modality_keys"]
    width = sum(WIDTHS[key] for key in modality["state"]["modality_keys"])
    return {
        "images": {
            name: qwen.picture(case.seed + i, *case.size) if i < case.present else None
            for i, name in enumerate(cameras)
        },
        "state": (1.2 * generator.standard_normal(width)).astype(np.float32),
        "prompt": case.prompt,
    }


def noise(case: Case, chunk: int = 8) -> np.ndarray:
    """float32 [chunk, ACTION]."""
    return np.random.default_rng([case.seed, 5]).standard_normal((chunk, ACTION)).astype(np.float32)
