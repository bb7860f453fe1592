"""Checkpoint names of GR00T N1.7 (Isaac-GR00T; LeRobot behind a prefix)."""

from innerloop.blocks import dit, embodiment, qwen3_vl
from innerloop.policies.groot.config import GrootConfig
from innerloop.weights import NameTable

BACKBONE, HEAD = "backbone.model.model.", "action_head."
# Saved beside what is run: the language head and final norm, layers above the selected one, a mask used in training.
UNUSED = ("backbone.model.lm_head.*", f"{BACKBONE}language_model.norm.weight", f"{HEAD}mask_token")

TIES = {f"{BACKBONE}language_model.embed_tokens.weight": "backbone.model.lm_head.weight"}  # LeRobot keeps one name
LAYERS = {
    "state_in": "state_encoder.layer1",
    "state_out": "state_encoder.layer2",
    "action_in": "action_encoder.W1",
    "action_mix": "action_encoder.W2",
    "action_out": "action_encoder.W3",
    "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}


def name_table(config: GrootConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = qwen3_vl.names(config.backbone, BACKBONE, "backbone.")
    targets |= dit.names(config.dit, f"{HEAD}model.", "dit.") | _refiner(config.refiner.layers)
    for ours, theirs in LAYERS.items():
        targets |= embodiment.names(f"{HEAD}{theirs}", ours)
    targets |= {f"norm_{kind}": (f"{HEAD}vlln.{kind}",) for kind in ("weight", "bias")}
    targets["place"] = (f"{HEAD}position_embedding.weight",)
    depth = config.backbone.language.depth
    above = tuple(f"{BACKBONE}language_model.layers.{i}.*" for i in range(depth, config.backbone_layers))
    return NameTable(targets, TIES, (("_groot_model.", ""),), (*UNUSED, *above))


def _refiner(layers: int) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for i in range(layers):
        theirs, mine = f"{HEAD}vl_self_attention.transformer_blocks.{i}.", f"refiner.{i}."
        for kind in ("weight", "bias"):
            found |= {
                f"{mine}norm1_{kind}": (f"{theirs}norm1.{kind}",),
                f"{mine}qkv_{kind}": tuple(f"{theirs}attn1.to_{p}.{kind}" for p in "qkv"),
                f"{mine}out_{kind}": (f"{theirs}attn1.to_out.0.{kind}",),
                f"{mine}norm2_{kind}": (f"{theirs}norm3.{kind}",),
                f"{mine}up_{kind}": (f"{theirs}ff.net.0.proj.{kind}",),
                f"{mine}down_{kind}": (f"{theirs}ff.net.2.{kind}",),
            }
    return found
