"""A random model without files: LeRobot draws it, innerloop runs the same weights."""

from dataclasses import replace

import numpy as np
import pytest

from innerloop.blocks.sizes import DecoderSizes, VisionSizes
from innerloop.engine import NO_FILES, assemble, place
from innerloop.measure.against.lerobot import LeRobotPolicy, sized
from innerloop.measure.parity import compare
from innerloop.policies import FAMILIES
from recipes.tiny.make import Recipe


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_both_sides_run_the_weights_that_lerobot_drew(agree, family):
    sizes = Recipe().architecture()
    full = FAMILIES[family].default(2, 10, 5)
    config = replace(
        full,
        vision=VisionSizes(**sizes["vision"], image_size=224),
        language=DecoderSizes(**sizes["language"]),
        expert=DecoderSizes(**sizes["expert"]),
    )
    processor = FAMILIES[family].synthetic(config)
    with sized(family, sizes):
        official = LeRobotPolicy.random(
            family, processor, config.cameras, "cpu", "float32", chunk_size=10, n_action_steps=10, num_inference_steps=5
        )
    placement = place("cpu", "fp32", 1, "fused")
    policy = assemble(FAMILIES[family], config, placement, processor, official.weights(), NO_FILES)
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in config.cameras}
    observation = {"images": images, "state": generator.standard_normal(32).astype(np.float32), "prompt": "open it"}
    agree(compare(policy, official, observation, generator.standard_normal((10, 32)).astype(np.float32)))
    policy.close()
