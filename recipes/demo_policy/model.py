"""pi0.5 at small size in LeRobot's own code, its processors, and how both are saved."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from innerloop.measure.against.lerobot import EXTENSION, require, sized
from innerloop.simulation.world import CAMERAS, SIZE
from recipes.demo_policy.record import CHUNK
from recipes.tiny import tokenizer as text

VOCABULARY = 576
CAPACITY = 64
STEPS = 5
_ATTENTION = {"depth": 6, "heads": 8, "kv_heads": 1, "head_dim": 32}  # LeRobot's loss needs 8
ARCHITECTURE = {
    "vision": {"hidden_size": 192, "intermediate_size": 768, "layers": 4, "heads": 3, "patch_size": 14},
    "language": {"width": 256, "mlp_dim": 768, **_ATTENTION, "vocab_size": VOCABULARY},
    "expert": {"width": 128, "mlp_dim": 384, **_ATTENTION},
}


def configuration() -> Any:
    """LeRobot's PI05Config of the policy."""
    configs = require("lerobot.configs")
    feature, kind = configs.PolicyFeature, configs.FeatureType
    return require("lerobot.policies.pi05").PI05Config(
        chunk_size=CHUNK,
        n_action_steps=CHUNK // 2,
        num_inference_steps=STEPS,
        image_resolution=(SIZE, SIZE),
        tokenizer_max_length=CAPACITY,
        input_features={f"observation.images.{name}": feature(kind.VISUAL, (3, SIZE, SIZE)) for name in CAMERAS}
        | {"observation.state": feature(kind.STATE, (4,))},
        output_features={"action": feature(kind.ACTION, (4,))},
        push_to_hub=False,
        device="cpu",
    )


def build(config: Any) -> Any:
    """PI05Policy with LeRobot's initial weights, scaled for training from nothing."""
    with sized("pi05", ARCHITECTURE):
        policy = require("lerobot.policies.pi05").PI05Policy(config)
    return policy.float()


def tower(policy: Any) -> Any:
    """The vision tower: images [B, 3, H, W] in -1..1 to an object with last_hidden_state [B, patches, width]."""
    return policy.model.paligemma_with_expert.paligemma.model.vision_tower


def processors(config: Any, statistics: dict[str, dict[str, Tensor]], directory: Path) -> tuple[Any, Any]:
    """LeRobot's pre- and postprocessor over the tokenizer written into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    text.save(text.train(VOCABULARY), directory)
    module = require("lerobot.policies.pi05.processor_pi05")
    step = require("lerobot.processor.tokenizer_processor")
    from_here = require("transformers").AutoTokenizer.from_pretrained(str(directory))
    # LeRobot names a tokenizer that has to be downloaded; ours is in the checkpoint's own directory.
    with mock.patch.object(step, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda name: from_here)):
        before, after = module.make_pi05_pre_post_processors(config, dataset_stats=statistics)
    for each in before.steps:
        if isinstance(each, step.TokenizerProcessorStep):
            each.tokenizer_name = "."
    return before, after


def save(policy: Any, before: Any, after: Any, directory: Path) -> None:
    """Writes the checkpoint with bfloat16 weights; reading them as float32 loses nothing."""
    with torch.no_grad():
        policy = policy.cpu().to(torch.bfloat16)
    policy.config.device = "cpu"
    policy.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {EXTENSION: ARCHITECTURE}, indent=4) + "\n")
    before.save_pretrained(directory)
    after.save_pretrained(directory)
