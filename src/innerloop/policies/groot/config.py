"""Sizes of a GR00T N1.7, read from config.json and from what processor_config.json says of the embodiment in use."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from innerloop.blocks import qwen3_vl
from innerloop.blocks.dit import DiTSizes
from innerloop.blocks.qwen3 import Qwen3Sizes
from innerloop.blocks.qwen3_vision import Qwen3VisionSizes
from innerloop.blocks.qwen3_vl import Qwen3VLSizes
from innerloop.blocks.sizes import VisionSizes
from innerloop.contract import CheckpointError
from innerloop.process.chat import framing
from innerloop.process.qwen3vl import Slots, image_rules
from innerloop.weights import Checkpoint
from innerloop.weights.embodiments import embodiment
from innerloop.weights.fields import Fields

EXTENSION = "innerloop_architecture"  # the key of config.json for sizes that are not the published ones and not in it
CHAT_TOKENS = 5  # `<|im_start|>user\n` and `<|im_end|>\n`
TEXT_CAPACITY = 128  # tokens of an instruction; the longest of the published data sets have some 60
WIDEST = 16 / 9  # of frames whose aspect is kept: how much room a picture has

# nvidia/Cosmos-Reason2-2B config.json, a Qwen3-VL-2B; GR00T checkpoints name it and hold its weights, not its sizes.
COSMOS_REASON2 = Qwen3VLSizes(
    Qwen3VisionSizes(1024, 4096, 24, 16, patch_size=16, image_size=768, out=2048, deepstack=(5, 11, 17)),
    Qwen3Sizes(width=2048, depth=28, mlp_dim=6144, heads=16, kv_heads=8, head_dim=128, vocab_size=151936),
)
# What this implementation is: a config.json that says otherwise is refused.
FIXED: tuple[Mapping[str, Any], ...] = (
    {"use_vlln": True, "add_pos_embed": True, "use_alternate_vl_dit": True, "state_history_length": 1},
    {"positional_embeddings": None, "norm_type": "ada_norm", "interleave_self_attention": True},
    {"positional_embeddings": None},
)
TRANSFORMER = ("num_attention_heads", "attention_head_dim", "num_layers")
SIZES = {
    "embodiments": "max_num_embodiments",
    "hidden": "hidden_size",
    "places": "max_seq_len",
    "text_every": "attend_text_every_n_blocks",
    "chunk": "action_horizon",
    "steps": "num_inference_timesteps",
    "buckets": "num_timestep_buckets",
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
}


@dataclass(frozen=True)
class GrootConfig:
    """Sizes of the model, and of one robot's decisions.

    backbone: its language part as deep as it is run, of backbone_layers. refiner: the transformer between backbone and
    actions. places: learned positions. cameras times frames are the images of a decision, each of up to `patches`.
    The defaults are those of nvidia/GR00T-N1.7-3B.
    """

    backbone: Qwen3VLSizes
    backbone_layers: int
    refiner: VisionSizes
    dit: DiTSizes
    cameras: tuple[str, ...]
    frames: int = 1
    patches: int = 256
    resizes: int = 1
    embodiment: int = 0
    embodiments: int = 32
    hidden: int = 1024
    places: int = 1024
    text_every: int = 2
    chunk: int = 40
    steps: int = 4
    buckets: int = 1000
    max_state_dim: int = 132
    max_action_dim: int = 132
    text_capacity: int = TEXT_CAPACITY

    @property
    def slots(self) -> Slots:
        """Room for images and tokens."""
        images, merge = len(self.cameras) * self.frames, self.backbone.vision.merge
        return Slots.of(images, self.patches, merge, CHAT_TOKENS + self.text_capacity, self.resizes)

    @property
    def vision(self) -> Qwen3VisionSizes:
        """The vision tower."""
        return self.backbone.vision

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self.backbone.language.vocab_size

    @property
    def prompt_capacity(self) -> int:
        """Tokens of the longest sequence, images included."""
        return self.slots.tokens

    @property
    def masks(self) -> tuple[str, ...]:
        """Buffer that says which keys each cross block reads (Isaac-GR00T AlternateVLDiT)."""
        turn = 2 * self.text_every
        return tuple("text_valid" if block % turn == 0 else "image_valid" for block in self.dit.cross_blocks)


def read(checkpoint: Checkpoint, horizon: int | None) -> GrootConfig:
    """Raises CheckpointError for what is missing, contradicts or is another architecture."""
    stated, found = Fields("config.json", checkpoint.config), embodiment(checkpoint)
    own = None if checkpoint.config.get(EXTENSION) is None else stated.section(EXTENSION)
    whole = qwen3_vl.read_sizes(own) if own else COSMOS_REASON2
    if checkpoint.layout == "lerobot":  # LeRobot keeps the sizes in a base model elsewhere
        config = _sized(own, whole) if own else default(1, 40, 4)
        config = replace(config, steps=stated.size("num_inference_timesteps", config.steps))
    else:
        config = _sized(stated, whole)
    video = found.modality.get("video") or {}
    rules, shown = image_rules([checkpoint.path], whole.vision), framing(found.settings)
    rows, columns = rules.grid(*shown.largest(WIDEST))
    config = replace(
        config,
        cameras=tuple(video.get("modality_keys") or found.cameras),
        frames=len(video.get("delta_indices") or (0,)),
        patches=rows * columns,
        resizes=shown.resizes + shown.refitted(rules.fitted),
        embodiment=found.index,
    )
    if horizon not in (None, config.chunk):
        raise CheckpointError(f"horizon={horizon} was asked of a checkpoint trained with action_horizon {config.chunk}")
    if config.embodiment >= config.embodiments:
        raise CheckpointError(
            f"'{found.name}' has row {found.index} of {config.embodiments} in the weights; correct it"
        )
    return config


def default(cameras: int, chunk: int, steps: int) -> GrootConfig:
    """The published size, for square pictures of 256 pixels."""
    language = replace(COSMOS_REASON2.language, depth=16)
    return GrootConfig(
        backbone=Qwen3VLSizes(COSMOS_REASON2.vision, language),
        backbone_layers=COSMOS_REASON2.language.depth,
        refiner=VisionSizes(2048, 8192, 4, 32, patch_size=1, image_size=1),
        dit=DiTSizes(heads=32, head_dim=48, depth=32, context_width=2048, interleave=True, output=1024),
        cameras=tuple(f"camera{i}" for i in range(cameras)),
        chunk=chunk,
        steps=steps,
    )


def _sized(stated: Fields, whole: Qwen3VLSizes) -> GrootConfig:
    action, refiner = (stated.section(name, required=True) for name in ("diffusion_model_cfg", "vl_self_attention_cfg"))
    for part, fixed in zip((stated.values, action.values, refiner.values), FIXED, strict=True):
        wrong = {name: part[name] for name, value in fixed.items() if part.get(name, value) != value}
        if wrong:
            raise CheckpointError(f"config.json says {wrong}, which is another model than the published GR00T N1.7")
    width, depth = whole.language.width, stated.size("select_layer")
    heads, head_dim, layers, output = (action.size(name) for name in (*TRANSFORMER, "output_dim"))
    dit = DiTSizes(heads, head_dim, layers, context_width=width, interleave=True, output=output)
    heads, head_dim, layers = (refiner.size(name) for name in TRANSFORMER)
    for name, found, needed in (
        ("vl_self_attention_cfg's width", heads * head_dim, width),
        ("input_embedding_dim", stated.size("input_embedding_dim"), dit.width),
        ("select_layer", max(depth, whole.language.depth), whole.language.depth),
    ):
        if found != needed:
            raise CheckpointError(f"config.json: {name} is {found}; what it meets has {needed}")
    return GrootConfig(
        backbone=Qwen3VLSizes(whole.vision, replace(whole.language, depth=depth)),
        backbone_layers=whole.language.depth,
        refiner=VisionSizes(width, 4 * width, layers, heads, patch_size=1, image_size=1),
        dit=dit,
        cameras=(),
        **{ours: stated.size(theirs) for ours, theirs in SIZES.items()},
    )
