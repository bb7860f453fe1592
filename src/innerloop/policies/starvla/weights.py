"""Checkpoint names of a starVLA run."""

from innerloop.blocks import affine, dit, dit_head, projections, qwen3_names, qwen3_vl, regression
from innerloop.blocks.dit import DiTSizes
from innerloop.policies.starvla.config import PARALLEL, StarVlaConfig
from innerloop.weights.load import NameTable

VLM = "qwen_vl_interface.model."
LANGUAGE = f"{VLM}model.language_model."
HEAD = "action_model."


def name_table(config: StarVlaConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = qwen3_vl.names(config.vlm, f"{VLM}model.", "backbone.")
    ignored = [f"{VLM}lm_head.weight", f"{LANGUAGE}norm.weight"]
    if config.dit is not None:
        targets |= _flow(config, config.dit)
        ignored += [] if config.state_token else [f"{HEAD}state_encoder.*"]  # in the run though nothing calls it
        ignored += [] if config.tokens_mix else [f"{HEAD}future_tokens.weight"]
        if config.layerwise:
            ignored += [f"{HEAD}model.proj_out_*", *_beyond(config, config.dit)]
    elif config.framework == "QwenOFT":
        targets |= regression.names(f"{HEAD}model.", "regression.")
    else:
        targets |= qwen3_names.head(config.vlm.language, LANGUAGE, f"{VLM}lm_head.weight", "vocabulary.")
        ignored = [f"{VLM}lm_head.weight"] if config.vlm.language.tied else []
    return NameTable(targets, {}, ((PARALLEL, ""),), tuple(ignored))


def _beyond(config: StarVlaConfig, sizes: DiTSizes) -> list[str]:
    """Layers above the last that a block reads, and projections that no block reads."""
    unread = [i for i in range(sizes.depth) if not sizes.crosses(i)]
    above = [f"{LANGUAGE}layers.{i}.*" for i in range(config.vlm.language.depth, sizes.depth)]
    return above + [f"project_layers.{i}.*" for i in unread]


def _flow(config: StarVlaConfig, sizes: DiTSizes) -> qwen3_names.Names:
    names = dit.names(sizes, f"{HEAD}model.", "head.dit.")
    held = {our: place for our, place in dit_head.PLACES.items() if config.state_token or our not in dit_head.STATE}
    names |= affine.names({f"{our}_": f"{place.format('layer')}." for our, place in held.items()}, HEAD, "head.")
    if config.tokens_mix:
        names["head.future"] = (f"{HEAD}future_tokens.weight",)
    if config.positions:
        names["head.place"] = (f"{HEAD}position_embedding.weight",)
    if config.projected:
        names |= projections.names(sizes.cross_blocks, "project_layers.", "head.projections.")
    return names
