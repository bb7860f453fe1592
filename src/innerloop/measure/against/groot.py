"""LeRobot's GR00T N1.7, built from an Isaac-GR00T directory and read stage by stage through hooks (LeRobot 0.6.1)."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from innerloop.contract.errors import CheckpointError
from innerloop.measure.against.chat_inputs import chat_inputs
from innerloop.measure.against.lerobot import EXTENSION, Preparer, Weights, quiet, require
from innerloop.policies.groot.config import GrootConfig

_IMAGES = "observation.images."
_STATE = "observation.state"
_MODULE = "lerobot.policies.groot"


class LeRobotGroot:
    """LeRobot's policy and processors; `infer` for actions and timing, `trace` for every intermediate.

    `checkpoint` is an Isaac-GR00T directory with its backbone's tokenizer.json, `embodiment` one of its robots. `dtype`
    float32, or bfloat16 for weights and activations: so Isaac-GR00T serves it, and faster than LeRobot's float32 weights
    under autocast.
    """

    name = "lerobot"

    def __init__(self, checkpoint: str | Path, embodiment: str, device: str = "cpu", dtype: str = "float32") -> None:
        directory = Path(checkpoint)
        stated = _json(directory / "config.json")
        modality = _json(directory / "processor_config.json")["processor_kwargs"]["modality_configs"][embodiment]
        known = _json(directory / "statistics.json")[embodiment]
        widths = {part: sum(len(s["min"]) for s in known[part].values()) for part in ("state", "action")}
        self.cameras: list[str] = list(modality["video"]["modality_keys"])
        self.config = _config(self.cameras, widths, device)
        self.config.base_model_path, self.config.embodiment_tag = str(directory), embodiment
        self.config.action_decode_transform = None  # Isaac-GR00T leaves a simulator's conventions to its client
        self.config.max_state_dim, self.config.max_action_dim = stated["max_state_dim"], stated["max_action_dim"]
        with _sized(stated.get(EXTENSION)), quiet():
            self.policy = require(f"{_MODULE}.modeling_groot").GrootPolicy(self.config)
        _cast(self.policy.to(device), dtype)
        processing = require(f"{_MODULE}.processor_groot")
        self._before, self._after = processing.make_groot_pre_post_processors(self.config)
        self._chat = next(step for step in self._before.steps if hasattr(step, "use_albumentations"))
        self._chat._proc = _qwen_processor(directory)
        self._borrow: Preparer | None = None

    @classmethod
    def random(cls, processor: Preparer, config: GrootConfig, device: str, dtype: str, seed: int = 0) -> "LeRobotGroot":
        """The published size with random weights and no files; what the model takes comes from `processor`, ours."""
        self = cls.__new__(cls)
        widths = {"state": config.max_state_dim, "action": config.max_action_dim}
        self.cameras, self._borrow = list(config.cameras), processor
        self.config = _config(self.cameras, widths, device)
        model, modeling = require(f"{_MODULE}.groot_n1_7"), require(f"{_MODULE}.modeling_groot")
        with torch.device(device):
            built = model.GR00TN17(model.GR00TN17Config(**_sizes(config)), load_backbone_weights=False)
        _randomize(built, seed)
        self.policy = modeling.GrootPolicy.__new__(modeling.GrootPolicy)
        torch.nn.Module.__init__(self.policy)
        self.policy.config, self.policy._groot_model = self.config, _cast(built, dtype)
        return self

    def weights(self) -> Weights:
        """The weights as innerloop reads them from a checkpoint, so that both sides can run the same random model."""
        return Weights(self.policy._groot_model.state_dict())

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions, float32 [chunk, max_action_dim]; the whole official call, its postprocessor included."""
        actions = self._predict(self._batch(observation), noise)
        if self._borrow is None:
            self._after(actions)
        return _numpy(actions[0])

    def guided(
        self, observation: Mapping[str, Any], noise: np.ndarray, previous: np.ndarray, *, delay: int, horizon: int = 10
    ) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim] that continue `previous` by GR00T's own rule.

        previous float32 [n, action_dim], n at most `horizon`: normalised actions not yet executed; delay: steps that
        pass meanwhile.
        """
        settings = require("lerobot.policies.rtc.configuration_rtc").RTCConfig(execution_horizon=horizon)
        left = torch.from_numpy(np.array(previous, dtype=np.float32)).to(self.config.device)
        batch = self._batch(observation)
        with mock.patch.object(self.config, "rtc_config", settings, create=True):
            inputs, options = self.policy._prepare_n1_7_rtc_inputs(
                self.policy._filter_groot_inputs(batch, include_action=False),
                inference_delay=delay,
                prev_chunk_left_over=left,
            )
        return _numpy(self._predict(inputs, noise, options)[0])

    def trace(self, observation: Mapping[str, Any], noise: np.ndarray) -> dict[str, np.ndarray]:
        """Every stage's result in order, for one observation, without a batch dimension, floats as float32.

        tokens [T], grids [images, 2], pixels [patches, 3 * 2 * p^2], position_ids [3, T], state, vision [visual tokens,
        width], features and refined [T, width], state_token [D], velocity.<step> [chunk, max_action_dim], normalized
        [chunk, action_dim], actions [horizon, action_dim].
        """
        batch = self._batch(observation)
        seen: dict[str, list[Any]] = {}
        model = self.policy._groot_model
        head, backbone = model.action_head, model.backbone
        with contextlib.ExitStack() as stack:
            for name, module in (
                ("vision", backbone.visual),
                ("features", backbone.language_model.layers[-1]),
                ("refined", head.vl_self_attention),
                ("state_token", head.state_encoder),
                ("velocity", head.action_decoder),
            ):
                stack.callback(module.register_forward_hook(_note(seen, name)).remove)
            asked = stack.enter_context(
                mock.patch.object(backbone.model.model, "forward", wraps=backbone.model.model.forward)
            )
            normalized = self._predict(batch, noise)
        ids = asked.call_args.kwargs["position_ids"]
        vision = seen["vision"][0]
        result = {
            "tokens": batch["input_ids"][0],
            "grids": batch["image_grid_thw"][:, 1:],
            "pixels": batch["pixel_values"],
            "position_ids": ids[-3:, 0],
            "state": batch["state"][0, 0],
            "vision": torch.cat(list(vision.pooler_output)),
            "features": seen["features"][0][0],
            "refined": seen["refined"][0][0],
            "state_token": seen["state_token"][0][0, 0],
        }
        result |= {f"velocity.{step}": value[0, 1:] for step, value in enumerate(seen["velocity"])}
        actions = self._after(normalized)[0]
        result |= {"normalized": normalized[0, :, : actions.shape[1]], "actions": actions}
        return {name: _numpy(value) for name, value in result.items()}

    def _batch(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        device = self.config.device
        if self._borrow is not None:
            return self._borrowed(self._borrow.prepare(observation))
        raw: dict[str, Any] = {_STATE: torch.as_tensor(np.asarray(observation["state"], dtype=np.float32))}
        for name, frame in observation["images"].items():
            if frame is not None:
                picture = torch.from_numpy(np.array(frame)).movedim(-1, -3)
                raw[_IMAGES + name.removeprefix(_IMAGES)] = picture[None] if picture.ndim == 4 else picture
        batch: dict[str, Any] = self._before({**raw, "task": observation["prompt"]})
        return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}

    def _borrowed(self, prepared: Any) -> dict[str, torch.Tensor]:
        """Our inputs in the words of transformers; the image token is the published one, ours may be another."""
        inputs = prepared.inputs
        own = chat_inputs(inputs, self.policy._groot_model.backbone.visual.config)
        image = torch.from_numpy(inputs["visual_rows"][: own["input_ids"].shape[1]] >= 0)
        own |= {
            "input_ids": torch.where(image, _image_token(), own["input_ids"]),
            "state": torch.from_numpy(inputs["state"])[None, None],
            "embodiment_id": torch.zeros(1, dtype=torch.int32),
        }
        return {name: value.to(self.config.device) for name, value in own.items()}

    @torch.no_grad()
    def _predict(self, batch: dict[str, Any], noise: np.ndarray, options: Any = None) -> torch.Tensor:
        """float32 [1, chunk, max_action_dim]: what LeRobot does before it cuts the chunk to what a robot executes."""
        start = torch.from_numpy(np.array(noise, np.float32)).to(self.config.device)[None]

        def randn(*_: Any, dtype: torch.dtype = torch.float32, **__: Any) -> torch.Tensor:
            return start.to(dtype)

        inputs = self.policy._filter_groot_inputs(batch, include_action=options is not None)
        with mock.patch.object(torch, "randn", randn):
            actions: torch.Tensor = self.policy._groot_model.get_action(inputs, options)["action_pred"]
        return actions.float()


@contextlib.contextmanager
def _sized(architecture: Mapping[str, Any] | None) -> Iterator[None]:
    """Within it LeRobot builds the backbone with the sizes of `architecture`, our extension of config.json, if any."""
    if architecture is None:
        yield
        return
    made = require("transformers").Qwen3VLConfig(**architecture)
    with mock.patch.object(require(f"{_MODULE}.groot_n1_7"), "_cosmos_reason2_qwen3_vl_config", return_value=made):
        yield


def _sizes(config: GrootConfig) -> dict[str, Any]:
    """Our sizes in the words of a GR00T config.json, the backbone's excepted."""
    action, refiner = config.dit, config.refiner
    plain = {"positional_embeddings": None, "dropout": 0.0, "final_dropout": True}
    return {
        "select_layer": config.backbone.language.depth,
        "backbone_embedding_dim": action.context_width,
        "hidden_size": config.hidden,
        "input_embedding_dim": action.width,
        "max_state_dim": config.max_state_dim,
        "max_action_dim": config.max_action_dim,
        "action_horizon": config.chunk,
        "num_inference_timesteps": config.steps,
        "max_seq_len": config.places,
        "max_num_embodiments": config.embodiments,
        "attend_text_every_n_blocks": config.text_every,
        "diffusion_model_cfg": {
            **plain,
            "num_layers": action.depth,
            "num_attention_heads": action.heads,
            "attention_head_dim": action.head_dim,
            "norm_type": "ada_norm",
            "output_dim": action.output,
            "interleave_self_attention": True,
        },
        "vl_self_attention_cfg": {
            **plain,
            "num_layers": refiner.layers,
            "num_attention_heads": refiner.heads,
            "attention_head_dim": refiner.hidden_size // refiner.heads,
        },
    }


def _image_token() -> int:
    return int(require(f"{_MODULE}.groot_n1_7")._cosmos_reason2_qwen3_vl_config().image_token_id)


def _config(cameras: Sequence[str], widths: Mapping[str, int], device: str) -> Any:
    configs = require("lerobot.configs")
    feature, kind = configs.PolicyFeature, configs.FeatureType
    return require(f"{_MODULE}.configuration_groot").GrootConfig(
        input_features={
            **{f"{_IMAGES}{name}": feature(kind.VISUAL, (3, 256, 256)) for name in cameras},
            _STATE: feature(kind.STATE, (widths["state"],)),
        },
        output_features={"action": feature(kind.ACTION, (widths["action"],))},
        push_to_hub=False,
        device=device,
        use_bf16=False,
    )


def _qwen_processor(directory: Path) -> Any:
    """transformers' Qwen3-VL processor from local files; LeRobot would fetch the published backbone's."""
    transformers = require("transformers")
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json: copy that of nvidia/Cosmos-Reason2-2B there")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    for name in ("image", "video"):
        setattr(tokenizer, f"{name}_token", f"<|{name}_pad|>")
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
    tokenizer.pad_token, tokenizer.padding_side = "<|endoftext|>", "left"
    half = [0.5] * 3
    images = transformers.Qwen2VLImageProcessor(
        **{"image_mean": half, "image_std": half, **_json(directory / "preprocessor_config.json")}
    )
    videos = transformers.Qwen3VLVideoProcessor(patch_size=images.patch_size, merge_size=images.merge_size)
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=_TEMPLATE)


# What Qwen3-VL's own template does with one turn of images and text.
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _randomize(model: Any, seed: int) -> None:
    """Fills every parameter from one seeded generator at a scale that keeps activations near one; none stays zero."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator, device=device)
            if parameter.ndim == 1:
                value = 0.1 * value + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:  # per-embodiment weights are [E, in, out]
                inner = parameter.shape[1] if name.endswith(".W") else parameter[0].numel()
                value = value / inner**0.5
            parameter.copy_(value)


def _cast(model: Any, dtype: str) -> Any:
    """Weights to `dtype`; rotary frequencies stay float32, as in LeRobot (Isaac-GR00T rounds them with the rest)."""
    kept = {name: value for name, value in model.named_buffers() if name.endswith("inv_freq")}
    model.to(getattr(torch, dtype)).eval()
    for name, value in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, value)
    return model


def _note(seen: dict[str, list[Any]], name: str) -> Any:
    def hook(_: Any, __: Any, output: Any) -> None:
        seen.setdefault(name, []).append(output)

    return hook


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give the directory that holds it")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    array: np.ndarray = (value.float() if value.is_floating_point() else value).numpy()
    return array
