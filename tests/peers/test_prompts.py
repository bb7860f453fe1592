"""Prompts of any length and content give LeRobot's token ids, positions and actions."""

from unittest import mock

import numpy as np
import pytest

from recipes.tiny.make import Recipe

RECIPES = {
    "pi05": Recipe("pi05", cameras=1, chunk=10, steps=5, capacity=200, state=3, image_size=56),
    "pi0": Recipe("pi0", cameras=2, chunk=10, steps=5, capacity=48, state=3, image_size=56),
}
TEXTS = [
    "",
    "\n",
    "  leading and trailing \n",
    "under_scores and\nnew\nlines\n\n",
    "pick   up\tthe block",
    "na\u00efve caf\u00e9 \u2014 \u6a5f\u68b0",
    "Task: 12345, State: 6;",
    "WHAT!? (42%)",
]


def tokens_of(both, text):
    return int(both.policy.processor.prepare(both.observation(prompt=text)).inputs["prompt_length"][0])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_odd_text(sides, agree, family, text):
    both = sides(RECIPES[family])
    agree(both.compare(both.observation(prompt=text)))


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 199, 200])
def test_lengths_around_the_captured_capacities(sides, agree, length):
    both = sides(RECIPES["pi05"])
    text = "7" * (length - tokens_of(both, "7") + 1)  # a digit is one token
    assert tokens_of(both, text) == length
    agree(both.compare(both.observation(prompt=text)))


@pytest.mark.parametrize("length", [2, 3, 24, 47, 48])
def test_lengths_up_to_the_capacity(sides, agree, length):
    both = sides(RECIPES["pi0"])
    text = "7" * (length - tokens_of(both, ""))
    assert tokens_of(both, text) == length
    agree(both.compare(both.observation(prompt=text)))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_one_token(sides, agree, family):
    both = sides(RECIPES[family])
    prepare, batch = both.policy.processor.prepare, both.official._batch

    def ours(observation):
        prepared = prepare(observation)
        tokens = np.array(prepared.inputs["tokens"])  # what an observation is prepared into may be shared, so read-only
        tokens[1:] = 0
        prepared.inputs.update(tokens=tokens, prompt_length=np.ones(1, np.int32))
        return prepared

    def theirs(observation):
        found = batch(observation)
        found["observation.language.tokens"][:, 1:] = 0
        found["observation.language.attention_mask"][:, 1:] = False
        return found

    with (
        mock.patch.object(both.policy.processor, "prepare", ours),
        mock.patch.object(both.official, "_batch", theirs),
    ):
        report = both.compare(both.observation())
    agree(report)
