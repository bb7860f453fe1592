"""What a flow policy's checkpoint says of itself: sizes, cameras, chunk, steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from innerloop.blocks import sizes
from innerloop.blocks.prefix import PrefixLayout
from innerloop.contract import CheckpointError

OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")  # openpi models/model.py IMAGE_KEYS
IMAGES = "observation.images."
_OPENPI = {  # openpi models/pi0_config.py, models/model.py IMAGE_RESOLUTION: what a directory need not state
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "action_dim": 32,
    "image_resolution": (224, 224),
}


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
    vision, language, expert = _architecture(config)
    for kind in ("input_features", "output_features"):
        _check_features(config, kind)
    return FlowConfig(
        family=str(_field(config, "type")),
        vision=vision,
        language=language,
        expert=expert,
        cameras=_cameras(config),
        chunk=_positive(config, "chunk_size"),
        steps=_positive(config, "num_inference_steps"),
        max_state_dim=_positive(config, "max_state_dim"),
        max_action_dim=_positive(config, "max_action_dim"),
        prompt_capacity=_positive(config, "tokenizer_max_length"),
        periods=(_period(config, "min_period", 4e-3), _period(config, "max_period", 4.0)),
        rotary_dtype=torch.bfloat16 if config.get("dtype") == "bfloat16" else torch.float32,
    )


def read_openpi(config: Mapping[str, Any], family: str, horizon: int | None) -> FlowConfig:
    """FlowConfig of an openpi directory; its config.json may be absent, the horizon then comes from the caller."""
    chunk = config.get("action_horizon", horizon)
    if chunk is None:
        raise CheckpointError(
            "this openpi checkpoint has no config.json with 'action_horizon' and tensors do not show it; "
            "pass horizon= (10 for pi05_libero, 15 for pi05_droid, 50 for most others)"
        )
    if horizon is not None and chunk != horizon:
        raise CheckpointError(f"horizon={horizon} was given but config.json says action_horizon={chunk}")
    full = {**_OPENPI, "action_horizon": chunk, "max_token_len": 200 if family == "pi05" else 48, **config}
    vision, language, expert = _architecture(full)
    dims = _positive(full, "action_dim")
    return FlowConfig(
        family=family,
        vision=vision,
        language=language,
        expert=expert,
        cameras=OPENPI_CAMERAS,
        chunk=_positive(full, "action_horizon"),
        steps=10,  # openpi Pi0.sample_actions num_steps default
        max_state_dim=dims,
        max_action_dim=dims,
        prompt_capacity=_positive(full, "max_token_len"),
    )


def _architecture(config: Mapping[str, Any]) -> tuple[sizes.VisionSizes, sizes.DecoderSizes, sizes.DecoderSizes]:
    resolution = _field(config, "image_resolution")
    square = isinstance(resolution, list | tuple) and len(resolution) == 2 and resolution[0] == resolution[1]
    if not square or not isinstance(resolution[0], int) or resolution[0] <= 0:
        raise CheckpointError(f"config.json image_resolution is {resolution}; SigLIP needs square images, [224, 224]")
    image_size = resolution[0]
    own = config.get("innerloop_architecture")
    if own is None:
        vision = sizes.VisionSizes(**sizes.SO400M, image_size=image_size)
        language = _spoken(_field(config, "paligemma_variant"))
        return vision, language, sizes.published(_field(config, "action_expert_variant"))
    if not isinstance(own, Mapping) or set(own) != {"vision", "language", "expert"}:
        found = sorted(own) if isinstance(own, Mapping) else own
        raise CheckpointError(
            f"config.json innerloop_architecture has sections {found}; expected vision, language and expert"
        )
    for part, section in own.items():
        if not isinstance(section, Mapping):
            raise CheckpointError(f"config.json innerloop_architecture.{part} is {section!r}; it is an object of sizes")
    vision = sizes.from_mapping(
        sizes.VisionSizes, {**own["vision"], "image_size": image_size}, "innerloop_architecture.vision"
    )
    language = sizes.from_mapping(sizes.DecoderSizes, own["language"], "innerloop_architecture.language")
    expert = sizes.from_mapping(sizes.DecoderSizes, own["expert"], "innerloop_architecture.expert")
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


def _cameras(config: Mapping[str, Any]) -> tuple[str, ...]:
    features = _field(config, "input_features")
    named = [k for k, f in features.items() if f.get("type") == "VISUAL"]
    empty = config.get("empty_cameras", 0)
    if not isinstance(empty, int) or empty < 0:
        raise CheckpointError(f"config.json empty_cameras is {empty!r}; it counts camera slots")
    named += [k for i in range(empty) if (k := f"{IMAGES}empty_camera_{i}") not in features]
    if not named:
        raise CheckpointError("config.json input_features names no camera (an entry of type VISUAL)")
    return tuple(name.removeprefix(IMAGES) for name in named)


def _check_features(config: Mapping[str, Any], kind: str) -> None:
    features = {} if config.get(kind) is None else config[kind]
    if not isinstance(features, Mapping):
        raise CheckpointError(f"config.json {kind} is {features!r}; it is an object {{name: {{type, shape}}}}")
    for name, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, Mapping) else None
        if not isinstance(shape, list) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
            raise CheckpointError(
                f"config.json {kind}: '{name}' has the shape {shape!r}; it is a list of whole numbers"
            )


def _period(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, float | int) or value <= 0:
        raise CheckpointError(f"config.json {name} is {value!r}; it must be a positive number")
    return float(value)


def _field(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise CheckpointError(
            f"config.json has no '{name}'; a LeRobot {config.get('type', 'policy')} checkpoint states it"
        )
    return config[name]


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = _field(config, name)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json {name} is {value!r}; it must be a positive whole number")
    return value
