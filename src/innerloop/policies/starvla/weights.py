"""Checkpoint names of a starVLA run."""

from innerloop.blocks import dit, qwen3_names, qwen3_vl, regression
from innerloop.policies.starvla.config import LAYERWISE, StarVlaConfig
from innerloop.weights.load import NameTable

VLM = "qwen_vl_interface.model."
LANGUAGE = f"{VLM}model.language_model."
HEAD = "action_model."


def name_table(config: StarVlaConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = qwen3_vl.names(config.vlm, f"{VLM}model.", "backbone.")
    ignored = [f"{VLM}lm_head.weight", f"{LANGUAGE}norm.weight"]
    if config.dit is not None:
        targets |= _flow(config)
        targets |= dit.names(config.dit, f"{HEAD}model.", "head.dit.")
        ignored += [] if config.state_token else [f"{HEAD}state_encoder.*"]  # in the run though nothing calls it
        ignored += [] if config.tokens_mix else [f"{HEAD}future_tokens.weight"]
        if config.framework in LAYERWISE:
            ignored += [f"{HEAD}model.proj_out_*", *_beyond(config)]
    elif config.framework == "QwenOFT":
        targets |= regression.names(f"{HEAD}model.", "regression.")
    else:
        targets |= qwen3_names.head(config.vlm.language, LANGUAGE, f"{VLM}lm_head.weight", "vocabulary.")
        ignored = [f"{VLM}lm_head.weight"] if config.vlm.language.tied else []
    return NameTable(targets, {}, (("module.", ""),), tuple(ignored))


def _beyond(config: StarVlaConfig) -> list[str]:
    """Layers above the last that a block reads, and projections that no block reads."""
    assert config.dit is not None
    unread = [i for i in range(config.dit.depth) if not config.dit.crosses(i)]
    above = [f"{LANGUAGE}layers.{i}.*" for i in range(config.vlm.language.depth, config.dit.depth)]
    return above + [f"project_layers.{i}.*" for i in unread]


def _flow(config: StarVlaConfig) -> dict[str, tuple[str, ...]]:
    pairs = {"encode_in": "action_encoder.layer1", "encode_mix": "action_encoder.layer2"}
    pairs |= {"encode_out": "action_encoder.layer3"}
    pairs |= {"decode_in": "action_decoder.layer1", "decode_out": "action_decoder.layer2"}
    if config.state_token:
        pairs |= {"state_in": "state_encoder.layer1", "state_out": "state_encoder.layer2"}
    names: qwen3_names.Names = {
        f"head.{our}_{k}": (f"{HEAD}{their}.{k}",) for our, their in pairs.items() for k in ("weight", "bias")
    }
    if config.tokens_mix:
        names["head.future"] = (f"{HEAD}future_tokens.weight",)
    if config.positions:
        names["head.position"] = (f"{HEAD}position_embedding.weight",)
    if config.framework == "QwenPI_v3" and config.dit and config.dit.context_width != config.vlm.language.width:
        for kind in ("weight", "bias"):
            blocks = config.dit.cross_blocks
            names[f"projections.norm_{kind}"] = tuple(f"project_layers.{block}.0.{kind}" for block in blocks)
            names[f"projections.{kind}"] = tuple(f"project_layers.{block}.1.{kind}" for block in blocks)
    return names
