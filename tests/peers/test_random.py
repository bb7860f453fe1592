"""A random model without files: LeRobot draws it, innerloop runs the same weights."""

from dataclasses import replace

import numpy as np
import pytest

from innerloop.blocks.sizes import DecoderSizes, VisionSizes
from innerloop.engine import assemble, flow_config, place
from innerloop.measure.against.lerobot import LeRobotPolicy, sized
from innerloop.measure.parity import compare
from innerloop.policies import FAMILIES
from innerloop.process.synthetic import synthetic_processor
from recipes.tiny.make import Recipe


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_both_sides_run_the_weights_that_lerobot_drew(agree, family):
    sizes = Recipe().architecture()
    full = flow_config.default(family, 2, 10, 5, FAMILIES[family].prompt_capacity)
    config = replace(
        full,
        vision=VisionSizes(**sizes["vision"], image_size=224),
        language=DecoderSizes(**sizes["language"]),
        expert=DecoderSizes(**sizes["expert"]),
    )
    processor = synthetic_processor(config, config.language.vocab_size)
    with sized(family, sizes):
        official = LeRobotPolicy.random(
            family, processor, config.cameras, "cpu", "float32", chunk_size=10, n_action_steps=10, num_inference_steps=5
        )
    placement = place("cpu", "fp32", 1, "fused")
    identity = {"statistics": "", "processors": ""}
    policy = assemble(FAMILIES[family], config, placement, processor, official.weights(), identity)
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in config.cameras}
    observation = {"images": images, "state": generator.standard_normal(32).astype(np.float32), "prompt": "open it"}
    agree(compare(policy, official, observation, generator.standard_normal((10, 32)).astype(np.float32)))
    policy.close()
