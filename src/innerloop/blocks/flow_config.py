"""What a flow policy's checkpoint says of itself: sizes, cameras, chunk, steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from innerloop.blocks import sizes
from innerloop.blocks.prefix import PrefixLayout
from innerloop.contract import CheckpointError
from innerloop.weights.fields import Fields

OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")  # openpi models/model.py IMAGE_KEYS
IMAGES = "observation.images."
_OPENPI = {  # openpi models/pi0_config.py, models/model.py IMAGE_RESOLUTION: what a directory need not state
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "action_dim": 32,
    "image_resolution": (224, 224),
}
_OWN = "innerloop_architecture"


@dataclass(frozen=True)
class FlowConfig:
    """One pi-style policy: image and prompt prefix, flow-matching action expert."""

    family: str
    vision: sizes.VisionSizes
    language: sizes.DecoderSizes
    expert: sizes.DecoderSizes
    cameras: tuple[str, ...]
    chunk: int
    steps: int
    max_state_dim: int
    max_action_dim: int
    prompt_capacity: int
    periods: tuple[float, float] = (4e-3, 4.0)  # openpi posemb_sincos min_period, max_period
    # LeRobot casts a bfloat16 policy whole, rotary frequencies with it; it was trained and runs with the rounded ones.
    rotary_dtype: torch.dtype = torch.float32

    def layout(self, state_tokens: int) -> PrefixLayout:
        """Token order of prefix and suffix."""
        return PrefixLayout(
            len(self.cameras),
            self.vision.tokens,
            self.prompt_capacity,
            state_tokens + self.chunk,
            self.language.head_dim,
            self.rotary_dtype,
        )


def default(family: str, cameras: int, chunk: int, steps: int, capacity: int) -> FlowConfig:
    """The published full size, for random weights: PaliGemma 2B, expert 300M, 224 pixels, 32 dimensions."""
    return FlowConfig(
        family=family,
        vision=sizes.VisionSizes(**sizes.SO400M, image_size=224),
        language=_spoken("gemma_2b"),
        expert=sizes.published("gemma_300m"),
        cameras=("base", "wrist", "left", "right")[:cameras],
        chunk=chunk,
        steps=steps,
        max_state_dim=32,
        max_action_dim=32,
        prompt_capacity=capacity,
    )


def _spoken(variant: str) -> sizes.DecoderSizes:
    return replace(sizes.published(variant), vocab_size=sizes.PALIGEMMA_VOCABULARY)


def read_lerobot(config: Mapping[str, Any]) -> FlowConfig:
    """FlowConfig from a LeRobot config.json of type pi0 or pi05."""
    fields = Fields("config.json", config)
    vision, language, expert = _architecture(fields)
    for kind in ("input_features", "output_features"):
        _check_features(fields, kind)
    return FlowConfig(
        family=fields.text("type"),
        vision=vision,
        language=language,
        expert=expert,
        cameras=_cameras(fields),
        chunk=fields.size("chunk_size"),
        steps=fields.size("num_inference_steps"),
        max_state_dim=fields.size("max_state_dim"),
        max_action_dim=fields.size("max_action_dim"),
        prompt_capacity=fields.size("tokenizer_max_length"),
        periods=(fields.number("min_period", 4e-3), fields.number("max_period", 4.0)),
        rotary_dtype=torch.bfloat16 if config.get("dtype") == "bfloat16" else torch.float32,
    )


def read_openpi(config: Mapping[str, Any], family: str, horizon: int | None) -> FlowConfig:
    """FlowConfig of an openpi directory; its config.json may be absent, the horizon then comes from the caller."""
    chunk = config.get("action_horizon", horizon)
    if chunk is None:
        raise CheckpointError(
            "this openpi checkpoint has no config.json with 'action_horizon' and tensors do not show it; "
            "pass horizon=, to bench --chunk (10 for pi05_libero, 15 for pi05_droid, 50 for most others)"
        )
    if horizon is not None and chunk != horizon:
        raise CheckpointError(f"horizon={horizon} was given but config.json says action_horizon={chunk}")
    usual = {**_OPENPI, "action_horizon": chunk, "max_token_len": 200 if family == "pi05" else 48}
    full = Fields("config.json", {**usual, **config})
    vision, language, expert = _architecture(full)
    dims = full.size("action_dim")
    return FlowConfig(
        family=family,
        vision=vision,
        language=language,
        expert=expert,
        cameras=OPENPI_CAMERAS,
        chunk=full.size("action_horizon"),
        steps=10,  # openpi Pi0.sample_actions num_steps default
        max_state_dim=dims,
        max_action_dim=dims,
        prompt_capacity=full.size("max_token_len"),
    )


def _architecture(config: Fields) -> tuple[sizes.VisionSizes, sizes.DecoderSizes, sizes.DecoderSizes]:
    image_size, other = config.counts("image_resolution", 2)
    if image_size != other or not image_size:
        raise config.wrong("image_resolution", "square for SigLIP, as [224, 224]")
    if config.values.get(_OWN) is None:
        vision = sizes.VisionSizes(**sizes.SO400M, image_size=image_size)
        language = _spoken(config.text("paligemma_variant"))
        return vision, language, sizes.published(config.text("action_expert_variant"))
    own = config.section(_OWN)
    parts = {name: own.section(name, required=True).values for name in ("vision", "language", "expert")}
    if set(own.values) != set(parts):
        raise CheckpointError(f"config.json {_OWN} has sections {sorted(own.values)}; expected {', '.join(parts)}")
    vision = sizes.from_mapping(sizes.VisionSizes, {**parts["vision"], "image_size": image_size}, f"{_OWN}.vision")
    language = sizes.from_mapping(sizes.DecoderSizes, parts["language"], f"{_OWN}.language")
    expert = sizes.from_mapping(sizes.DecoderSizes, parts["expert"], f"{_OWN}.expert")
    _check_towers(vision, language, expert)
    return vision, language, expert


def _check_towers(vision: sizes.VisionSizes, language: sizes.DecoderSizes, expert: sizes.DecoderSizes) -> None:
    for name in ("depth", "heads", "kv_heads", "head_dim"):
        if getattr(language, name) != getattr(expert, name):
            raise CheckpointError(
                f"innerloop_architecture: language.{name} = {getattr(language, name)} but expert.{name} = "
                f"{getattr(expert, name)}; the two share their attention and must agree"
            )
    if vision.hidden_size % vision.heads:
        raise CheckpointError(
            f"innerloop_architecture.vision: hidden_size {vision.hidden_size} is not a multiple of heads {vision.heads}"
        )
    if language.vocab_size == 0:
        raise CheckpointError("innerloop_architecture.language: vocab_size is missing")


def _cameras(config: Fields) -> tuple[str, ...]:
    features = config.section("input_features").values
    named = [k for k, f in features.items() if f.get("type") == "VISUAL"]
    named += [k for i in range(config.count("empty_cameras", 0)) if (k := f"{IMAGES}empty_camera_{i}") not in features]
    if not named:
        raise CheckpointError("config.json input_features names no camera (an entry of type VISUAL)")
    return tuple(name.removeprefix(IMAGES) for name in named)


def _check_features(config: Fields, kind: str) -> None:
    features = config.section(kind)
    for name in features.values:
        feature = features.section(name, required=True)
        if not all(feature.counts("shape")) or not feature.values["shape"]:
            raise feature.wrong("shape", "a list of positive whole numbers")
