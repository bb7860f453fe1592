"""Checkpoint names of pi0.5 (LeRobot and openpi PyTorch)."""

from innerloop.blocks import names
from innerloop.blocks.flow_config import FlowConfig
from innerloop.weights.load import NameTable


def name_table(config: FlowConfig) -> NameTable:
    """Our parameter names -> theirs."""
    targets = names.siglip(config.vision, "vision.")
    targets |= names.gemma_prefix(config.language, "language.")
    targets |= names.expert(config.expert, "expert.")
    for kind in ("weight", "bias"):
        targets[f"modulation_{kind}"] = names.expert_norms(config.expert, f"dense.{kind}")
        for head in ("action_in", "action_out"):
            targets[f"{head}_{kind}"] = (f"{head}_proj.{kind}",)
        for head in ("time_in", "time_out"):
            targets[f"{head}_{kind}"] = (f"{head.replace('time', 'time_mlp')}.{kind}",)
    return NameTable(targets, names.TIES, names.PREFIXES, names.unused(config.language))
