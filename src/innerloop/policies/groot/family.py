"""GR00T N1.7 as the engine sees it."""

from innerloop.policies.groot import config
from innerloop.policies.groot.model import FLOAT32, Groot
from innerloop.policies.groot.plan import build, sample
from innerloop.policies.groot.weights import HEAD, name_table
from innerloop.policies.interface import Family
from innerloop.process.embodied import embodied_processor, synthetic_embodied
from innerloop.weights import Checkpoint

_MARKS = ("backbone.model.model.visual.pos_embed.weight", f"{HEAD}position_embedding.weight")


def _recognises(checkpoint: Checkpoint) -> bool:
    found = {name.removeprefix("_groot_model.") for name in checkpoint.tensors.names()}
    return all(mark in found for mark in _MARKS)


GROOT = Family(
    name="groot",
    summary="GR00T N1.7: Qwen3-VL features, per-embodiment encoders, a diffusion transformer",
    recognises=_recognises,
    config=config.read,
    processor=embodied_processor,
    model=Groot,
    float32=FLOAT32,
    name_table=name_table,
    plans=build,
    sample=sample,
    default=config.default,
    synthetic=synthetic_embodied,
)
