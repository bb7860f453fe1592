"""What a starVLA run says of itself: config.yaml, the sizes of its Qwen3-VL, and what the run leaves unsaid."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from innerloop.blocks import qwen3_vl
from innerloop.blocks.dit import DiTSizes
from innerloop.blocks.qwen3 import Qwen3Sizes
from innerloop.blocks.qwen3_published import published
from innerloop.blocks.qwen3_vl import Qwen3VLSizes
from innerloop.contract import CheckpointError
from innerloop.process.qwen3vl import ImageRules, Slots, image_rules
from innerloop.process.starvla import Robot, read_robot
from innerloop.weights import Checkpoint
from innerloop.weights.fields import Fields
from innerloop.weights.starvla import action_section, base_model, data_section, framework_name

LAYERWISE = ("QwenPI", "QwenPI_v3")
FLOW = (*LAYERWISE, "QwenGR00T")
TEXT_ROOM = 256  # tokens for template, instruction, state and chat marks
LARGEST_IMAGE = 1200  # patches of a 640x480 image, where the run does not fix a size
STEP = 64  # tokens between two captured capacities
ANSWER = 128  # FAST tokens of one chunk
PARALLEL = "module."  # before every name, where torch's DistributedDataParallel was saved
EMBEDDING = "qwen_vl_interface.model.model.language_model.embed_tokens.weight"
# starVLA GR00T_ActionHeader.py DiTConfig: heads, head_dim
DIT = {"DiT-B": (12, 64), "DiT-L": (32, 48)}


@dataclass(frozen=True)
class StarVlaConfig:
    """One policy. dit: of the flow heads, whose contexts have its context_width."""

    framework: str
    vlm: Qwen3VLSizes
    rules: ImageRules
    slots: Slots
    image_size: tuple[int, int] | None  # width and height of the first resize
    template: str | None  # around the instruction
    chunk: int
    steps: int
    max_action_dim: int
    state_dim: int  # of the state that the head takes as a vector, 0 without
    state_in_text: bool
    robot: Robot
    dit: DiTSizes | None
    hidden: int  # of the heads' small products
    future_tokens: int
    positions: int  # rows of the action position table, 0 without
    buckets: int

    @property
    def cameras(self) -> tuple[str, ...]:
        """In training order."""
        return self.robot.cameras

    @property
    def prompt_capacity(self) -> int:
        """Tokens of the whole sequence, images included."""
        return self.slots.tokens

    @property
    def layerwise(self) -> bool:
        """Whether each cross block has a context of its own, from the layer of its index."""
        return self.framework in LAYERWISE

    @property
    def projected(self) -> bool:
        """Whether contexts are projected from the language model's width to another."""
        compressed = self.dit is not None and self.dit.context_width != self.vlm.language.width
        return self.framework == "QwenPI_v3" and compressed

    @property
    def tokens_mix(self) -> bool:
        """Whether any block lets one token of the head see another; else only the action tokens matter."""
        return self.dit is not None and len(self.dit.cross_blocks) < self.dit.depth

    @property
    def head_tokens(self) -> int:
        """Rows of one robot in the head."""
        return self.chunk + (self.future_tokens + self.state_token if self.tokens_mix else 0)

    @property
    def state_token(self) -> bool:
        """Whether the head reads the state."""
        return self.state_dim > 0 and self.tokens_mix


def framework(checkpoint: Checkpoint) -> str | None:
    """The framework's name, or None for what is no starVLA run."""
    return framework_name(checkpoint.config) if checkpoint.layout == "starvla" else None


def default(name: str, dit: str, cameras: int, chunk: int, steps: int) -> StarVlaConfig:
    """The published size: Qwen3-VL-4B, one 224x224 image a camera of 49 tokens, 7 action dimensions."""
    action = {"action_horizon": chunk, "num_inference_timesteps": steps, "action_model_type": dit}
    rules = ImageRules(min_pixels=224 * 224)
    names = ("image_0", "wrist_image", "left_image", "right_image")[:cameras]
    run = {
        "framework": {"name": name, "action_model": action},
        "datasets": {"vla_data": {"obs_image_size": [224, 224], "include_state": name == "QwenPI_v3"}},
    }
    return _assemble(run, published("Qwen3-VL-4B"), rules, Robot(names, "q99"), None)


def read(checkpoint: Checkpoint, horizon: int | None) -> StarVlaConfig:
    """StarVlaConfig of a run. Raises CheckpointError for what it does not say, with the line that would say it."""
    sizes, rules = _backbone(checkpoint)
    robot = read_robot(checkpoint.config, checkpoint.assets or "")
    return _assemble(checkpoint.config, sizes, rules, robot, horizon)


def _backbone(checkpoint: Checkpoint) -> tuple[Qwen3VLSizes, ImageRules]:
    name, place = base_model(checkpoint.path, checkpoint.config)
    described = place is not None and (place / "config.json").is_file()
    sizes = qwen3_vl.read_sizes(Fields.read(place / "config.json")) if place and described else published(name)
    rules = image_rules((checkpoint.path, place), sizes.vision)
    stored = next((name for name in checkpoint.tensors.names() if name.removeprefix(PARALLEL) == EMBEDDING), None)
    if stored is None:
        raise CheckpointError(f"{checkpoint.path}: the weights hold no '{EMBEDDING}'; copy them from the run again")
    # a vocabulary with action tokens is longer than the published one
    rows = checkpoint.tensors.info(stored).shape[0]
    return replace(sizes, language=replace(sizes.language, vocab_size=rows)), rules


def _assemble(
    run: Mapping[str, Any], sizes: Qwen3VLSizes, rules: ImageRules, robot: Robot, horizon: int | None
) -> StarVlaConfig:
    name, data, action = framework_name(run), data_section(run), action_section(run)
    chunk, resized = _chunk(action, horizon), _resized(name, data)
    dit = _dit(name, action, sizes.language)
    depth = dit.cross_blocks[-1] + 1 if name in LAYERWISE and dit else sizes.language.depth  # layers, the lowest ones
    state, taken = action.count("state_dim", 0), str(data.values.get("include_state", False)) != "False"
    patches = LARGEST_IMAGE if resized is None else math.prod(rules.grid(resized[1], resized[0]))
    room = TEXT_ROOM + (chunk if name == "QwenOFT" else 0)
    slots = Slots.of(len(robot.cameras), patches, rules.merge, room)
    return StarVlaConfig(
        framework=name,
        vlm=replace(sizes, language=replace(sizes.language, depth=depth)),
        rules=rules,
        slots=replace(slots, tokens=-(-slots.tokens // STEP) * STEP),
        image_size=resized,
        template=None if data.values.get("CoT_prompt") is None else data.text("CoT_prompt"),
        chunk=chunk,
        steps=action.size("num_inference_timesteps", 4) if name in FLOW else 1,
        max_action_dim=action.size("action_dim", 7),
        state_dim=state if taken and name in ("QwenPI", "QwenGR00T") else 0,
        state_in_text=taken and name in ("QwenPI_v3", "QwenOFT"),
        robot=robot,
        dit=dit,
        hidden=action.size("hidden_size", 1024) if name == "QwenGR00T" else 1024,
        future_tokens=action.size("num_target_vision_tokens", 32),
        positions=action.size("max_seq_len", 1024) if action.flag("add_pos_embed", True) else 0,
        buckets=action.size("num_timestep_buckets", 1000),
    )


def _resized(name: str, data: Fields) -> tuple[int, int] | None:
    """Width and height of the first resize, which starVLA's QwenFast does not have."""
    if name == "QwenFast" or not data.values.get("obs_image_size"):
        return None
    width, height = data.counts("obs_image_size", 2)
    if not width or not height:
        raise data.wrong("obs_image_size", "a width and a height of at least one pixel")
    return width, height


def _dit(name: str, action: Fields, language: Qwen3Sizes) -> DiTSizes | None:
    if name not in FLOW:
        return None
    stated = action.section("diffusion_model_cfg")
    for field, wanted in (("norm_type", "ada_norm"), ("positional_embeddings", None)):
        if stated.values.get(field, wanted) != wanted:
            raise stated.wrong(field, f"{wanted!r}, the only one known to this engine")
    before = "use_canonical_forward"  # the name of interleave_self_attention once
    interleave = stated.flag(before, stated.flag("interleave_self_attention", name != "QwenPI_v3"))
    if name == "QwenGR00T":
        kind = action.text("action_model_type", "DiT-B")
        if kind not in DIT:
            raise action.wrong("action_model_type", f"one of {', '.join(DIT)}")
        usual = dict(zip(("num_attention_heads", "attention_head_dim"), DIT[kind], strict=True))
        heads, dim = (stated.size(field, value) for field, value in usual.items())
        output = stated.size("output_dim", action.size("hidden_size", 1024))
        return DiTSizes(heads, dim, stated.size("num_layers", 16), language.width, interleave, output)
    dim, width = stated.size("attention_head_dim", 64), language.width
    if name == "QwenPI_v3" and stated.values.get("action_dit_hidden_dim", 1024) is not None:  # null: not projected
        width = stated.count("action_dit_hidden_dim", 1024) or width
    if width % dim:
        raise stated.wrong("attention_head_dim", f"a divisor of the width {width}")
    return DiTSizes(width // dim, dim, language.depth, width, interleave)


def _chunk(action: Fields, horizon: int | None) -> int:
    before = "future_action_window_size"  # one less (starVLA share_tools.apply_config_compat)
    stated = action.size("action_horizon", action.count(before) + 1 if action.values.get(before) is not None else None)
    if horizon not in (None, stated):
        raise CheckpointError(f"horizon={horizon} was asked of a run trained with action_horizon {stated}")
    return stated
