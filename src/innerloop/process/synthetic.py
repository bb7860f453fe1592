"""Processing for random weights: no files, no statistics; one token a word, so that a prompt's length can be chosen."""

import zlib

from innerloop.process import text
from innerloop.process.build import Sizes
from innerloop.process.cameras import Cameras
from innerloop.process.image import ImageSpec
from innerloop.process.pipeline import FramesStep, NormalizeStep, Pipeline, Processor, PromptStep, Widths, WidthStep
from innerloop.process.state import LEROBOT, Normalizer

RESERVED = 256  # ids below this are a real vocabulary's special and byte tokens


def synthetic_processor(sizes: Sizes, vocabulary: int, resolution: tuple[int, int] = (224, 224)) -> Processor:
    """A Processor of full widths whose normalisation is the identity."""

    def encode(prompt: str) -> list[int]:
        words = prompt.replace("\n", " \n").split(" ")
        return [RESERVED + zlib.crc32(word.encode()) % (vocabulary - RESERVED) for word in words if word]

    identity = Normalizer.from_statistics("random weights", "IDENTITY", {}, LEROBOT)
    tokenizer = text.Tokenizer(encode, bos=2, size=vocabulary, source="one token a word (random weights)")
    cameras = Cameras(sizes.cameras, {}, {})
    widths = Widths(sizes.max_state_dim, sizes.max_state_dim, sizes.max_action_dim, sizes.max_action_dim, sizes.chunk)
    pipeline = (
        Pipeline()
        .push(NormalizeStep(identity, identity))
        .push(PromptStep(text.CLEANED_LINE, tokenizer, sizes.prompt_capacity))
        .push(WidthStep(sizes.max_state_dim, sizes.max_action_dim, state_input=sizes.family == "pi0"))
        .push(FramesStep(cameras, ImageSpec(), resolution))
    )
    facts = {"family": sizes.family, "layout": "random weights", "notes": ["weights and statistics are made up"]}
    return Processor(pipeline, cameras, widths, LEROBOT.dtype, facts)
