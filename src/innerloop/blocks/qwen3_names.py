"""Checkpoint names of Qwen3 and Qwen3-VL, as transformers writes them; `theirs` is what stands before each tower."""

from innerloop.blocks import affine
from innerloop.blocks.qwen3 import Qwen3Sizes
from innerloop.blocks.qwen3_vision import Qwen3VisionSizes

Names = dict[str, tuple[str, ...]]

VISION = {
    "norm1_": "norm1.",
    "qkv_": "attn.qkv.",
    "out_": "attn.proj.",
    "norm2_": "norm2.",
    "up_": "mlp.linear_fc1.",
    "down_": "mlp.linear_fc2.",
}
PRODUCTS = {"up_": "linear_fc1.", "down_": "linear_fc2."}  # of a merger


def language(sizes: Qwen3Sizes, theirs: str, ours: str) -> Names:
    """Names of blocks.qwen3.Qwen3: `theirs` ends before `embed_tokens`."""
    names: Names = {f"{ours}embedding": (f"{theirs}embed_tokens.weight",)}
    for i in range(sizes.depth):
        layer, mine = f"{theirs}layers.{i}.", f"{ours}layers.{i}."
        names |= {
            f"{mine}input_norm": (f"{layer}input_layernorm.weight",),
            f"{mine}qkv_weight": tuple(f"{layer}self_attn.{p}_proj.weight" for p in "qkv"),
            f"{mine}q_norm": (f"{layer}self_attn.q_norm.weight",),
            f"{mine}k_norm": (f"{layer}self_attn.k_norm.weight",),
            f"{mine}out_weight": (f"{layer}self_attn.o_proj.weight",),
            f"{mine}mlp_norm": (f"{layer}post_attention_layernorm.weight",),
            f"{mine}gate_up_weight": (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"),
            f"{mine}down_weight": (f"{layer}mlp.down_proj.weight",),
        }
    return names


def head(sizes: Qwen3Sizes, theirs: str, lm_head: str, ours: str) -> Names:
    """Names of blocks.qwen3.Qwen3Head: `theirs` ends before `norm`."""
    names: Names = {f"{ours}norm": (f"{theirs}norm.weight",)}
    if not sizes.tied:
        names[f"{ours}weight"] = (lm_head,)
    return names


def vision(sizes: Qwen3VisionSizes, theirs: str, ours: str) -> Names:
    """Names of blocks.qwen3_vision.Qwen3Vision: `theirs` ends before `patch_embed`."""
    names: Names = {f"{ours}position": (f"{theirs}pos_embed.weight",)}
    names |= affine.names({"patch_": "patch_embed.proj."}, theirs, ours)
    features = [f"deepstack_merger_list.{sizes.deepstack.index(layer)}." for layer in sorted(sizes.deepstack)]
    merged = {"norm_": ("merger.norm.",), "feature_norm_": tuple(f"{at}norm." for at in features)}
    merged |= {mine: tuple(f"{at}{layer}" for at in ("merger.", *features)) for mine, layer in PRODUCTS.items()}
    names |= affine.names({part: found for part, found in merged.items() if found}, theirs, f"{ours}mergers.")
    for i in range(sizes.layers):
        names |= affine.names(VISION, f"{theirs}blocks.{i}.", f"{ours}layers.{i}.")
    return names
