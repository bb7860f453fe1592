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
from innerloop.process.chat import framing, image_rules
from innerloop.process.qwen3vl import Slots
from innerloop.weights import Checkpoint
from innerloop.weights.embodiments import embodiment

EXTENSION = "innerloop_architecture"  # the key of config.json under which a backbone of another size states its own
CHAT_TOKENS = 5  # `<|im_start|>user\n` and `<|im_end|>\n`
TEXT_CAPACITY = 128  # tokens of an instruction; the longest of the published data sets have some 60
WIDEST = 16 / 9  # of frames whose aspect is kept: how much room a picture has

# nvidia/Cosmos-Reason2-2B config.json, a Qwen3-VL-2B; GR00T checkpoints name it and hold its weights, not its sizes.
COSMOS_REASON2 = Qwen3VLSizes(
    Qwen3VisionSizes(1024, 4096, 24, 16, patch_size=16, image_size=768, out=2048, deepstack=(5, 11, 17)),
    Qwen3Sizes(width=2048, depth=28, mlp_dim=6144, heads=16, kv_heads=8, head_dim=128, vocab_size=151936),
)
# What this implementation is: a config.json that says otherwise is refused.
FIXED: dict[str, Mapping[str, Any]] = {
    "": {"use_vlln": True, "add_pos_embed": True, "use_alternate_vl_dit": True, "state_history_length": 1},
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "norm_type": "ada_norm",
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {"positional_embeddings": None},
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
        images = len(self.cameras) * self.frames
        per_image = self.patches // self.backbone.vision.merge**2 + 2
        return Slots(images, self.patches, images * per_image + CHAT_TOKENS + self.text_capacity)

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
    stated, found = checkpoint.config, embodiment(checkpoint)
    whole = qwen3_vl.read_sizes(stated[EXTENSION]) if EXTENSION in stated else COSMOS_REASON2
    video = found.modality.get("video") or {}
    rows, columns = image_rules(checkpoint.path, whole.vision).grid(*framing(found.settings).largest(WIDEST))
    saved = checkpoint.layout == "lerobot"  # without sizes: LeRobot asks for the base model beside it
    config = replace(
        default(1, 40, 4) if saved else _sized(stated, whole),
        cameras=tuple(video.get("modality_keys") or found.cameras),
        frames=len(video.get("delta_indices") or (0,)),
        patches=rows * columns,
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


def _sized(stated: Mapping[str, Any], whole: Qwen3VLSizes) -> GrootConfig:
    action, refiner = (_part(stated, name) for name in ("diffusion_model_cfg", "vl_self_attention_cfg"))
    for part, fixed in ((stated, ""), (action, "diffusion_model_cfg"), (refiner, "vl_self_attention_cfg")):
        wrong = {name: part[name] for name, value in FIXED[fixed].items() if part.get(name, value) != value}
        if wrong:
            raise CheckpointError(
                f"config.json {fixed} says {wrong}, which is another model than the published GR00T N1.7"
            )
    width, heads = whole.language.width, (_whole(action, "num_attention_heads"), _whole(refiner, "num_attention_heads"))
    wide = heads[1] * _whole(refiner, "attention_head_dim")
    output, depth = _whole(action, "output_dim"), _whole(stated, "select_layer")
    dit = DiTSizes(
        heads[0],
        _whole(action, "attention_head_dim"),
        _whole(action, "num_layers"),
        width,
        interleave=True,
        output=output,
    )
    for name, found, needed in (
        ("vl_self_attention_cfg's width", wide, width),
        ("input_embedding_dim", _whole(stated, "input_embedding_dim"), dit.width),
        ("select_layer", max(depth, whole.language.depth), whole.language.depth),
    ):
        if found != needed:
            raise CheckpointError(f"config.json: {name} is {found}; what it meets has {needed}")
    return GrootConfig(
        backbone=Qwen3VLSizes(whole.vision, replace(whole.language, depth=depth)),
        backbone_layers=whole.language.depth,
        refiner=VisionSizes(wide, 4 * wide, _whole(refiner, "num_layers"), heads[1], patch_size=1, image_size=1),
        dit=dit,
        cameras=(),
        embodiments=_whole(stated, "max_num_embodiments"),
        hidden=_whole(stated, "hidden_size"),
        places=_whole(stated, "max_seq_len"),
        text_every=_whole(stated, "attend_text_every_n_blocks"),
        chunk=_whole(stated, "action_horizon"),
        steps=_whole(stated, "num_inference_timesteps"),
        buckets=_whole(stated, "num_timestep_buckets"),
        max_state_dim=_whole(stated, "max_state_dim"),
        max_action_dim=_whole(stated, "max_action_dim"),
    )


def _part(stated: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = stated.get(name)
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json has no '{name}'; a GR00T N1.7 checkpoint states it")
    return part


def _whole(stated: Mapping[str, Any], name: str) -> int:
    value = stated.get(name)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json {name} is {value!r}; it must be a positive whole number")
    return value
