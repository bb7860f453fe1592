"""starVLA as the engine sees it: one family a published head."""

from functools import partial

from innerloop.policies.interface import Family, Processor
from innerloop.policies.starvla import config
from innerloop.policies.starvla.model import FLOAT32, StarVla
from innerloop.policies.starvla.plan import build, sample
from innerloop.policies.starvla.weights import name_table
from innerloop.process.starvla import processor, synthetic
from innerloop.weights import Checkpoint
from innerloop.weights.starvla import action_section


def _family(name: str, framework: str, summary: str, dit: str | None = None) -> Family:
    return Family(
        name=name,
        summary=summary,
        recognises=partial(_recognises, framework, dit),
        config=config.read,
        processor=processor,
        model=StarVla,
        float32=FLOAT32,
        name_table=name_table,
        plans=build,
        sample=sample,
        default=partial(config.default, framework, dit or "DiT-B"),
        synthetic=_synthetic,
    )


def _synthetic(sizes: config.StarVlaConfig) -> Processor:
    return synthetic(sizes, sizes.vlm.language.vocab_size)


def _recognises(framework: str, dit: str | None, checkpoint: Checkpoint) -> bool:
    if config.framework(checkpoint) != framework:
        return False
    return dit is None or action_section(checkpoint.config).text("action_model_type", "DiT-B") == dit


STARVLA = (
    _family("starvla-pi3", "QwenPI_v3", "starVLA QwenPI_v3: every layer of Qwen3-VL projected into a 1024-wide DiT"),
    _family("starvla-pi", "QwenPI", "starVLA QwenPI: every layer of Qwen3-VL into a DiT of its width"),
    _family("starvla-gr00t", "QwenGR00T", "starVLA QwenGR00T: the last layer of Qwen3-VL into a DiT-B", "DiT-B"),
    _family("starvla-gr00t-large", "QwenGR00T", "starVLA QwenGR00T with a DiT-L", "DiT-L"),
    _family("starvla-oft", "QwenOFT", "starVLA QwenOFT: placeholder tokens of Qwen3-VL regressed to actions"),
    _family("starvla-fast", "QwenFast", "starVLA QwenFast: actions as FAST tokens of Qwen3-VL's answer"),
)
