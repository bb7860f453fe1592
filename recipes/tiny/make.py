"""Writes tiny pi0.5 and pi0 checkpoints with random weights through LeRobot's own model and processor code.

Run from the repository's root in an environment with LeRobot 0.6.1, innerloop and sentencepiece:
python -m recipes.tiny.make examples/checkpoints/tiny-pi05
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from innerloop.measure.against.lerobot import EXTENSION, FAMILIES, randomize, require, sized
from recipes.tiny import tokenizer as text

CAMERAS = ("base", "wrist", "side")
JOINTS = ("waist", "shoulder", "elbow", "forearm", "wrist_angle", "wrist_rotate", "gripper")
MODES = ("MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10")


@dataclass(frozen=True)
class Recipe:
    """What a tiny checkpoint is made of; widths and lengths in features, tokens, steps and pixels.

    empty: camera slots of the model that no robot fills.
    """

    family: str = "pi05"
    cameras: int = 2
    empty: int = 0
    chunk: int = 10
    steps: int = 10
    capacity: int = 64
    state: int = 8
    actions: int = 7
    padded: int = 32
    image_size: int = 224
    vocabulary: int = 576
    normalization: str | None = None  # one of MODES; None keeps the family's own
    relative: bool = False
    dtype: str = "float32"
    seed: int = 0

    def architecture(self) -> dict[str, dict[str, int]]:
        """The sizes, in the form of the config.json extension; `vocabulary` bounds the tokenizer too."""
        attention = {"depth": 2, "heads": 8, "kv_heads": 1, "head_dim": 16}
        return {
            "vision": {"hidden_size": 48, "intermediate_size": 96, "layers": 2, "heads": 3, "patch_size": 14},
            "language": {"width": 64, "mlp_dim": 128, **attention, "vocab_size": self.vocabulary},
            "expert": {"width": 32, "mlp_dim": 64, **attention},
        }


def statistics(recipe: Recipe) -> dict[str, dict[str, torch.Tensor]]:
    """Seeded statistics of a plausible robot: every mode LeRobot knows has its numbers."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    result = {}
    for key, width in (("observation.state", recipe.state), ("action", recipe.actions)):
        mean = 0.5 * torch.randn(width, generator=generator)
        std = 0.6 + torch.rand(width, generator=generator)
        spans = {"min": -2.5, "max": 2.7, "q01": -2.1, "q99": 2.2, "q10": -1.2, "q90": 1.3}
        result[key] = {"mean": mean, "std": std} | {name: mean + span * std for name, span in spans.items()}
    return result


def configuration(recipe: Recipe) -> Any:
    """LeRobot's configuration object for the recipe."""
    lerobot = require(f"lerobot.policies.{recipe.family}")
    configs = require("lerobot.configs")
    feature, kind = configs.PolicyFeature, configs.FeatureType
    cameras = {f"observation.images.{name}": (3, 240, 320) for name in CAMERAS[: recipe.cameras]}
    make = lerobot.PI05Config if recipe.family == "pi05" else lerobot.PI0Config
    config = make(
        chunk_size=recipe.chunk,
        n_action_steps=recipe.chunk,
        num_inference_steps=recipe.steps,
        max_state_dim=recipe.padded,
        max_action_dim=recipe.padded,
        image_resolution=(recipe.image_size, recipe.image_size),
        tokenizer_max_length=recipe.capacity,
        use_relative_actions=recipe.relative,
        action_feature_names=list(JOINTS[: recipe.actions]) if recipe.relative else None,
        input_features={name: feature(kind.VISUAL, shape) for name, shape in cameras.items()}
        | {"observation.state": feature(kind.STATE, (recipe.state,))},
        output_features={"action": feature(kind.ACTION, (recipe.actions,))},
        empty_cameras=recipe.empty,
        push_to_hub=False,
        dtype=recipe.dtype,
        device="cpu",
    )
    if recipe.normalization is not None:
        mode = configs.NormalizationMode[recipe.normalization]
        config.normalization_mapping |= {"STATE": mode, "ACTION": mode}
    return config


def write(directory: Path, recipe: Recipe) -> Path:
    """Writes the checkpoint: model, configuration with our extension, both processors, statistics, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = configuration(recipe)
    modeling = require(f"lerobot.policies.{recipe.family}")
    with sized(recipe.family, recipe.architecture()):
        policy = (modeling.PI05Policy if recipe.family == "pi05" else modeling.PI0Policy)(config)
    randomize(policy, recipe.seed)
    policy.save_pretrained(directory)
    _extend(directory / "config.json", recipe)
    trained = text.train(recipe.vocabulary)
    text.save(trained, directory)
    _save_processors(directory, config, recipe)
    return directory


def _extend(path: Path, recipe: Recipe) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {EXTENSION: recipe.architecture()}, indent=4) + "\n")


def _save_processors(directory: Path, config: Any, recipe: Recipe) -> None:
    module = require(f"lerobot.policies.{recipe.family}.processor_{recipe.family}")
    make = getattr(module, f"make_{recipe.family}_pre_post_processors")
    step = require("lerobot.processor.tokenizer_processor")
    # LeRobot names a tokenizer that has to be downloaded; ours is in the checkpoint's own directory.
    reader = SimpleNamespace(from_pretrained=lambda name: None)
    with mock.patch.object(step, "AutoTokenizer", reader):
        before, after = make(config, dataset_stats=statistics(recipe))
    for each in before.steps:
        if isinstance(each, step.TokenizerProcessorStep):
            each.tokenizer_name = "."
    before.save_pretrained(directory)
    after.save_pretrained(directory)


def main() -> None:
    """Command line of the recipe."""
    default = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=default.family)
    parser.add_argument("--normalization", choices=MODES, help="default: the family's own mode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default.dtype)
    parser.add_argument("--relative", action="store_true", help="actions relative to the state")
    for name, value in vars(default).items():
        if type(value) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--sentencepiece", action="store_true", help="write tokenizer.model beside tokenizer.json")
    arguments = vars(parser.parse_args())
    directory, sentencepiece = arguments.pop("directory"), arguments.pop("sentencepiece")
    recipe = Recipe(**arguments)
    write(directory, recipe)
    if sentencepiece:
        text.save_sentencepiece(text.train(recipe.vocabulary), directory / "tokenizer.model")


if __name__ == "__main__":
    main()
