"""Tiny random Qwen3, Qwen3-VL and StarVLA checkpoints: the same bytes from a seed wherever this is run.

Names and shapes are those of the official modules (transformers, starVLA), written out by hand: a loader that agrees
with them has been checked against something that is not itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Shapes = dict[str, tuple[int, ...]]

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QUERY = "\U0001f50d"  # the placeholder that StarVLA's OFT head reads
ROBOT_ACTIONS = 64  # <robot_action_N> tokens of a vocabulary with FAST tokens
VOCABULARY = 448

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rope_theta": 5000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
}
MROPE = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "depth": 4,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 36,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1, 2],
    "hidden_act": "gelu_pytorch_tanh",
}
IMAGES = {
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def tokenizer_json() -> str:
    """A byte-level BPE of the 256 bytes and a few merges, with Qwen's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("\u0120", "the"), ("u", "s"), ("us", "e"), ("use", "r"), ("r", "e")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    actions = [f"<robot_action_{i}>" for i in range(ROBOT_ACTIONS)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (QUERY, *actions)])
    return str(tokenizer.to_str())


def token_ids() -> dict[str, int]:
    """Ids of the special tokens."""
    added = json.loads(tokenizer_json())["added_tokens"]
    return {entry["content"]: entry["id"] for entry in added}


def config(kind: str, tied: bool = True) -> dict[str, Any]:
    """config.json of kind qwen3 or qwen3_vl."""
    if kind == "qwen3":
        return {"model_type": kind, **TEXT, "tie_word_embeddings": tied, "architectures": ["Qwen3ForCausalLM"]}
    ids = token_ids()
    return {
        "model_type": kind,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**TEXT, "rope_scaling": MROPE, "model_type": "qwen3_vl_text", "tie_word_embeddings": tied},
        "vision_config": {**VISION, "model_type": "qwen3_vl"},
        "tie_word_embeddings": tied,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def language_shapes(prefix: str) -> Shapes:
    """Tensors of the decoder, final norm included."""
    width, mlp, dim = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["head_dim"]
    q, kv = TEXT["num_attention_heads"] * dim, TEXT["num_key_value_heads"] * dim
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (VOCABULARY, width), f"{prefix}norm.weight": (width,)}
    for i in range(TEXT["num_hidden_layers"]):
        layer = f"{prefix}layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}post_attention_layernorm.weight": (width,),
            f"{layer}self_attn.q_norm.weight": (dim,),
            f"{layer}self_attn.k_norm.weight": (dim,),
            f"{layer}self_attn.q_proj.weight": (q, width),
            f"{layer}self_attn.k_proj.weight": (kv, width),
            f"{layer}self_attn.v_proj.weight": (kv, width),
            f"{layer}self_attn.o_proj.weight": (width, q),
            f"{layer}mlp.gate_proj.weight": (mlp, width),
            f"{layer}mlp.up_proj.weight": (mlp, width),
            f"{layer}mlp.down_proj.weight": (width, mlp),
        }
    return shapes


def vision_shapes(prefix: str) -> Shapes:
    """Tensors of the vision tower."""
    width, mlp, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    merged, out = 4 * width, VISION["out_hidden_size"]
    shapes: Shapes = {
        f"{prefix}patch_embed.proj.weight": (width, 3, 2, patch, patch),
        f"{prefix}patch_embed.proj.bias": (width,),
        f"{prefix}pos_embed.weight": (VISION["num_position_embeddings"], width),
    }
    mergers = [("merger.", width)] + [
        (f"deepstack_merger_list.{i}.", merged) for i in range(len(VISION["deepstack_visual_indexes"]))
    ]
    for name, normed in mergers:
        shapes |= affine(f"{prefix}{name}norm", normed)
        shapes |= affine(f"{prefix}{name}linear_fc1", merged, merged)
        shapes |= affine(f"{prefix}{name}linear_fc2", out, merged)
    for i in range(VISION["depth"]):
        block = f"{prefix}blocks.{i}."
        shapes |= affine(f"{block}norm1", width) | affine(f"{block}norm2", width)
        shapes |= affine(f"{block}attn.qkv", 3 * width, width) | affine(f"{block}attn.proj", width, width)
        shapes |= affine(f"{block}mlp.linear_fc1", mlp, width) | affine(f"{block}mlp.linear_fc2", width, mlp)
    return shapes


def shapes(kind: str, tied: bool = True) -> Shapes:
    """Tensors of a checkpoint of kind qwen3 or qwen3_vl."""
    found = (
        language_shapes("model.")
        if kind == "qwen3"
        else language_shapes("model.language_model.") | vision_shapes("model.visual.")
    )
    return found if tied else found | {"lm_head.weight": (VOCABULARY, TEXT["hidden_size"])}


def affine(name: str, rows: int, columns: int | None = None) -> Shapes:
    """A weight and its bias."""
    return {f"{name}.weight": (rows,) if columns is None else (rows, columns), f"{name}.bias": (rows,)}


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Every tensor drawn, none zero: norms around 1, biases and embeddings small, products of unit gain."""
    drawn = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        values = np.random.default_rng([seed, index]).standard_normal(shape)
        if len(shape) == 1:
            values = 0.1 * values + (
                1.0 if "norm" in name and name.endswith("weight") and "linear" not in name else 0.0
            )
        else:
            values = values / np.sqrt(np.prod(shape[1:]))
        drawn[name] = values.astype(np.float32)
    return drawn


def write(directory: Path, kind: str, seed: int, tied: bool = True) -> Path:
    """A Hugging Face directory of kind qwen3 or qwen3_vl."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(kind, tied), indent=1))
    (directory / "tokenizer.json").write_text(tokenizer_json())
    if kind == "qwen3_vl":
        (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    save_file(tensors(shapes(kind, tied), seed), directory / "model.safetensors")
    return directory


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: smooth enough that resizing means something."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3))
    fine = coarse.repeat(6, 0).repeat(6, 1)[:height, :width]
    noisy: np.ndarray = np.clip(fine + generator.integers(-12, 13, (height, width, 3)), 0, 255).astype(np.uint8)
    return noisy


@dataclass(frozen=True)
class Turn:
    """One user turn to a level: sizes of its images (height, width), a text, a seed."""

    kind: str
    images: tuple[tuple[int, int], ...]
    text: str
    seed: int
    tied: bool = True


# The aspect ratios take the resize down, up by the least number of pixels, down by the most, and nowhere.
TURNS = (
    Turn("qwen3", (), "pick up the red block", 21),
    Turn("qwen3", (), "the user is in \u6a5f\u68b0, the thing uses the other thing in the end", 22, tied=False),
    Turn("qwen3_vl", (), "no picture at all", 23),
    Turn("qwen3_vl", ((20, 31),), "what is in the picture", 24, tied=False),
    Turn("qwen3_vl", ((40, 31), (24, 64), (9, 30)), "compare the three", 25),
    Turn("qwen3_vl", ((90, 130),), "", 26),
)


def pictures(turn: Turn) -> list[np.ndarray]:
    """The images of a turn."""
    return [picture(100 * turn.seed + i, *size) for i, size in enumerate(turn.images)]
