"""Processing for random weights: no files, no statistics; one token a word, so that a prompt's length can be chosen."""

import zlib
from functools import partial

from innerloop.process import text
from innerloop.process.build import DEFAULT_RESOLUTION, NO_EDGE, Rules, Sizes, assemble
from innerloop.process.cameras import Cameras
from innerloop.process.pipeline import Processor, Widths
from innerloop.process.recipe import Recipe
from innerloop.process.state import LEROBOT, Normalizer

RESERVED = 256  # ids below this are a real vocabulary's special and byte tokens


def token_a_word(prompt: str, vocabulary: int) -> list[int]:
    """One id a word, the same on every machine."""
    words = prompt.replace("\n", " \n").split(" ")
    return [RESERVED + zlib.crc32(word.encode()) % (vocabulary - RESERVED) for word in words if word]


def synthetic_processor(sizes: Sizes, vocabulary: int) -> Processor:
    """The family's own template and steps; normalisation is the identity, a state has any width up to the model's."""

    identity = Normalizer.from_statistics("random weights", "IDENTITY", {})
    state, action = sizes.max_state_dim, sizes.max_action_dim
    return assemble(
        Rules(
            sizes=sizes,
            layout="random weights",
            recipe=Recipe("IDENTITY", "IDENTITY", LEROBOT.eps, sizes.prompt_capacity),
            convention=LEROBOT,
            cameras=Cameras(sizes.cameras),
            widths=Widths(state, state, action, action, sizes.chunk, exact_state=False),
            state=identity,
            action=identity,
            relative=None,
            template=text.LINE if sizes.family == "pi0" else text.TASK_AND_STATE,
            tokenizer=text.Tokenizer(
                partial(token_a_word, vocabulary=vocabulary),
                bos=2,
                size=vocabulary,
                source="one token a word (random weights)",
            ),
            resolution=DEFAULT_RESOLUTION,
            edge=NO_EDGE,
            assets=None,
            notes=("weights and statistics are made up",),
        )
    )
