"""Checkpoint names of GR00T N1.7 (Isaac-GR00T; LeRobot behind a prefix)."""

from innerloop.blocks import affine, dit, dit_head, embodiment, qwen3_vl
from innerloop.blocks.qwen3_names import Names
from innerloop.policies.groot.config import GrootConfig
from innerloop.weights import NameTable

BACKBONE, HEAD = "backbone.model.model.", "action_head."
# Saved beside what is run: the language head and final norm, layers above the selected one, a mask used in training.
UNUSED = ("backbone.model.lm_head.*", f"{BACKBONE}language_model.norm.weight", f"{HEAD}mask_token")

TIES = {f"{BACKBONE}language_model.embed_tokens.weight": "backbone.model.lm_head.weight"}  # LeRobot keeps one name
REFINER = {
    "norm1_": "norm1.",
    "qkv_": tuple(f"attn1.to_{part}." for part in "qkv"),
    "out_": "attn1.to_out.0.",
    "norm2_": "norm3.",
    "up_": "ff.net.0.proj.",
    "down_": "ff.net.2.",
}


def name_table(config: GrootConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = qwen3_vl.names(config.backbone, BACKBONE, "backbone.")
    targets |= dit.names(config.dit, f"{HEAD}model.", "dit.") | _refiner(config.refiner.layers)
    for ours, theirs in dit_head.PLACES.items():
        targets |= embodiment.names(f"{HEAD}{theirs.format('W')}", ours)
    targets |= affine.names({"norm_": "vlln."}, HEAD, "")
    targets["place"] = (f"{HEAD}position_embedding.weight",)
    depth = config.backbone.language.depth
    above = tuple(f"{BACKBONE}language_model.layers.{i}.*" for i in range(depth, config.backbone_layers))
    return NameTable(targets, TIES, (("_groot_model.", ""),), (*UNUSED, *above))


def _refiner(layers: int) -> Names:
    found: Names = {}
    for i in range(layers):
        found |= affine.names(REFINER, f"{HEAD}vl_self_attention.transformer_blocks.{i}.", f"refiner.{i}.")
    return found
