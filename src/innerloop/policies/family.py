"""The families there are, and which one a checkpoint is."""

from collections.abc import Mapping

from innerloop.contract import CheckpointError
from innerloop.policies.groot.family import GROOT
from innerloop.policies.interface import Family
from innerloop.policies.pi0.family import PI0
from innerloop.policies.pi05.family import PI05
from innerloop.policies.starvla.family import STARVLA
from innerloop.weights import Checkpoint

FAMILIES: Mapping[str, Family] = {family.name: family for family in (PI05, PI0, *STARVLA, GROOT)}


def detect(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint: what its tensors show, which must agree with the type that its config states."""
    stated = checkpoint.config.get("type") if checkpoint.layout == "lerobot" else None
    if stated is not None and str(stated) not in FAMILIES:
        raise CheckpointError(
            f"config.json says type '{stated}', which is not supported; supported are {sorted(FAMILIES)}"
        )
    shown = [family for family in FAMILIES.values() if family.recognises(checkpoint)]
    if len(shown) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: the tensors are those of {[f.name for f in shown] or 'no supported family'}; "
            f"supported families are {sorted(FAMILIES)}"
        )
    if stated is not None and stated != shown[0].name:
        raise CheckpointError(f"config.json says type '{stated}' but the tensors are those of '{shown[0].name}'")
    return shown[0]
