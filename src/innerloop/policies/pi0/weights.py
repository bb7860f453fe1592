"""Checkpoint names of pi0 (LeRobot and openpi PyTorch)."""

from innerloop.blocks import names
from innerloop.blocks.flow_config import FlowConfig
from innerloop.weights.load import NameTable


def name_table(config: FlowConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = names.siglip(config.vision, "vision.")
    targets |= names.gemma_prefix(config.language, "language.")
    targets |= names.expert(config.expert, "expert.")
    targets["expert_norms"] = names.expert_norms(config.expert, "weight")
    heads = {
        "state": "state_proj",
        "action_in": "action_in_proj",
        "action_out": "action_out_proj",
        "mix_in": "action_time_mlp_in",
        "mix_out": "action_time_mlp_out",
    }
    for ours, theirs in heads.items():
        for kind in ("weight", "bias"):
            targets[f"{ours}_{kind}"] = (f"{theirs}.{kind}",)
    return NameTable(targets, names.TIES, names.PREFIXES, names.unused(config.language))
