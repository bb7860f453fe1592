"""Checkpoint names of the shared towers, as openpi and LeRobot write them (without the leading `model.`)."""

from innerloop.blocks import affine
from innerloop.blocks.sizes import DecoderSizes, VisionSizes

Names = dict[str, tuple[str, ...]]

PALIGEMMA = "paligemma_with_expert.paligemma."
EXPERT = "paligemma_with_expert.gemma_expert."

# LeRobot writes every name behind `model.`; transformers before 4.52 nested PaliGemma's parts the other way round.
PREFIXES = (
    ("model.", ""),
    (f"{PALIGEMMA}language_model.model.", f"{PALIGEMMA}model.language_model."),
    (f"{PALIGEMMA}language_model.lm_head.", f"{PALIGEMMA}lm_head."),
    (f"{PALIGEMMA}vision_tower.", f"{PALIGEMMA}model.vision_tower."),
    (f"{PALIGEMMA}multi_modal_projector.", f"{PALIGEMMA}model.multi_modal_projector."),
)
EMBEDDING = f"{PALIGEMMA}model.language_model.embed_tokens.weight"
SIGLIP = {
    "norm1_": "layer_norm1.",
    "qkv_": tuple(f"self_attn.{part}_proj." for part in "qkv"),
    "out_": "self_attn.out_proj.",
    "norm2_": "layer_norm2.",
    "up_": "mlp.fc1.",
    "down_": "mlp.fc2.",
}
TIES = {EMBEDDING: f"{PALIGEMMA}lm_head.weight"}


def unused(language: DecoderSizes) -> tuple[str, ...]:
    """Tensors that a decision never reads: language heads, and all but K/V of the last prefix layer."""
    last = f"{PALIGEMMA}model.language_model.layers.{language.depth - 1}."
    return (
        f"{PALIGEMMA}lm_head.weight",
        f"{EXPERT}lm_head.weight",
        f"{EXPERT}model.embed_tokens.weight",
        f"{PALIGEMMA}model.language_model.norm.weight",
        f"{last}self_attn.q_proj.weight",
        f"{last}self_attn.o_proj.weight",
        f"{last}post_attention_layernorm.weight",
        f"{last}mlp.*",
    )


def siglip(sizes: VisionSizes, ours: str) -> Names:
    """Names of blocks.siglip.Siglip, projector included."""
    base = f"{PALIGEMMA}model.vision_tower.vision_model."
    names: Names = {f"{ours}position": (f"{base}embeddings.position_embedding.weight",)}
    names |= affine.names({"patch_": "embeddings.patch_embedding.", "norm_": "post_layernorm."}, base, ours)
    names |= affine.names({"projector_": "linear."}, f"{PALIGEMMA}model.multi_modal_projector.", ours)
    for i in range(sizes.layers):
        names |= affine.names(SIGLIP, f"{base}encoder.layers.{i}.", f"{ours}layers.{i}.")
    return names


def gemma_prefix(sizes: DecoderSizes, ours: str) -> Names:
    """Names of blocks.gemma.GemmaPrefix."""
    base = f"{PALIGEMMA}model.language_model."
    names: Names = {f"{ours}embedding": (EMBEDDING,)}
    for i in range(sizes.depth - 1):
        theirs, mine = f"{base}layers.{i}.", f"{ours}layers.{i}."
        names |= _products(theirs, mine)
        names[f"{mine}input_norm"] = (f"{theirs}input_layernorm.weight",)
        names[f"{mine}mlp_norm"] = (f"{theirs}post_attention_layernorm.weight",)
    theirs = f"{base}layers.{sizes.depth - 1}."
    names[f"{ours}last.input_norm"] = (f"{theirs}input_layernorm.weight",)
    names[f"{ours}last.kv_weight"] = (f"{theirs}self_attn.k_proj.weight", f"{theirs}self_attn.v_proj.weight")
    return names


def expert(sizes: DecoderSizes, ours: str) -> Names:
    """Names of blocks.expert.ActionExpert."""
    names: Names = {}
    for i in range(sizes.depth):
        names |= _products(f"{EXPERT}model.layers.{i}.", f"{ours}layers.{i}.")
    return names


def expert_norms(sizes: DecoderSizes, suffix: str) -> tuple[str, ...]:
    """The expert's norms in the order the layers apply them, the final one last."""
    layers = [
        f"{EXPERT}model.layers.{i}.{norm}.{suffix}"
        for i in range(sizes.depth)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    return (*layers, f"{EXPERT}model.norm.{suffix}")


def _products(theirs: str, mine: str) -> Names:
    return {
        f"{mine}qkv_weight": tuple(f"{theirs}self_attn.{p}_proj.weight" for p in "qkv"),
        f"{mine}out_weight": (f"{theirs}self_attn.o_proj.weight",),
        f"{mine}gate_up_weight": (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
        f"{mine}down_weight": (f"{theirs}mlp.down_proj.weight",),
    }
