"""LeRobot's pi0 and pi0.5, built from a checkpoint directory and read stage by stage through hooks (LeRobot 0.6.1)."""

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch

from innerloop.contract.errors import CheckpointError, ObservationError
from innerloop.measure.against.importing import imported
from innerloop.weights import TensorInfo

FAMILIES = ("pi05", "pi0")
EXTENSION = "innerloop_architecture"  # the key of config.json that carries sizes LeRobot has no name for
_IMAGES = "observation.images."
_STATE = "observation.state"
_LANGUAGE = "gemma_2b"  # the two size names LeRobot knows; sizes of our own go under them
_EXPERT = "gemma_300m"


def require(module: str) -> Any:
    """A LeRobot module. Raises InnerloopError that says how to install LeRobot."""
    return imported(module, "in a Python 3.12 environment: pip install 'lerobot==0.6.1' 'transformers>=5.4,<5.6'")


@contextlib.contextmanager
def sized(family: str, architecture: Mapping[str, Mapping[str, int]] | None) -> Iterator[None]:
    """Within it LeRobot builds `family` with the sizes of `architecture`, our extension of config.json, if any."""
    if architecture is None:
        yield
        return
    modeling = require(f"lerobot.policies.{family}.modeling_{family}")
    vision, language, expert = (architecture[part] for part in ("vision", "language", "expert"))
    variants = {_LANGUAGE: language, _EXPERT: expert}

    def gemma_sizes(variant: str) -> Any:
        part = variants[variant]
        names = ("width", "depth", "mlp_dim", "heads", "kv_heads", "head_dim")
        return modeling.GemmaConfig(*(part[name] for name in names))

    build_paligemma = modeling.PaliGemmaForConditionalGenerationWithPiGemma
    build_expert = modeling.PiGemmaForCausalLM

    def paligemma(config: Any) -> Any:
        config.vision_config.hidden_size = vision["hidden_size"]
        config.vision_config.intermediate_size = vision["intermediate_size"]
        config.vision_config.num_hidden_layers = vision["layers"]
        config.vision_config.num_attention_heads = vision["heads"]
        config.vision_config.patch_size = vision["patch_size"]
        config.vision_config.projection_dim = config.projection_dim = language["width"]
        config.text_config.vocab_size = config.image_token_index = language["vocab_size"]
        return build_paligemma(config)

    def expert_model(config: Any) -> Any:
        config.vocab_size = language["vocab_size"]
        return build_expert(config)

    with (
        mock.patch.object(modeling, "get_gemma_config", gemma_sizes),
        mock.patch.object(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", paligemma),
        mock.patch.object(modeling, "PiGemmaForCausalLM", expert_model),
    ):
        yield


def randomize(policy: Any, seed: int) -> None:
    """Fills every parameter from one seeded generator at a scale that keeps activations near one; none stays zero."""
    device = next(policy.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(policy.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator, device=device)
            if parameter.ndim == 1:
                value = 0.1 * value + (1.0 if parameter.float().mean() > 0.5 else 0.0)  # LayerNorm weights start at one
            elif "embed" in name and "patch" not in name:
                value = value / parameter.shape[-1] ** 0.5
            else:
                value = value / parameter[0].numel() ** 0.5
            parameter.copy_(value)
        paligemma = policy.model.paligemma_with_expert.paligemma
        # Published files hold one table under both names.
        paligemma.lm_head.weight.copy_(paligemma.model.language_model.embed_tokens.weight)


class Preparer(Protocol):
    """Gives token ids and the normalised state of an observation; process.Processor is one."""

    def prepare(self, observation: Mapping[str, Any]) -> Any:
        """An object with inputs["tokens"], inputs["prompt_length"] and context.normalized_state."""
        ...


class LeRobotPolicy:
    """LeRobot's policy and processors; `infer` for actions and timing, `trace` for every intermediate.

    `checkpoint` is a LeRobot directory, `dtype` float32 or bfloat16 where not the checkpoint's own, `tokenizer` a directory that replaces the one
    the checkpoint names (its own tokenizer.json is preferred anyway). Another dtype than the checkpoint's own changes
    the precision only: LeRobot would round the rotary frequencies with it, here they stay the checkpoint's.
    """

    name = "lerobot"

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        *,
        tokenizer: str | Path | None = None,
        compiled: bool = False,
    ) -> None:
        directory = Path(checkpoint)
        config, architecture = _read_config(directory)
        self._processor: Preparer | None = None
        own = config.dtype
        config.device, config.dtype, config.compile_model = device, dtype or own, compiled
        self.config = config
        with sized(config.type, architecture), quiet(), contextlib.redirect_stdout(io.StringIO()) as printed:
            self.policy = _policy_class(config.type).from_pretrained(directory, config=config)
        if "All keys loaded successfully" not in printed.getvalue():  # LeRobot goes on with random weights otherwise
            raise CheckpointError(f"LeRobot could not load {directory / 'model.safetensors'}: {printed.getvalue()}")
        set_frequencies(self.policy, own)
        overrides: dict[str, Any] = {"device_processor": {"device": device}}
        if tokenizer is not None or (directory / "tokenizer.json").exists():
            overrides["tokenizer_processor"] = {"tokenizer_name": str(tokenizer or directory)}
        self._before, self._after = require("lerobot.policies.factory").make_pre_post_processors(
            config,
            pretrained_path=str(directory),
            preprocessor_overrides=overrides,
            postprocessor_overrides={"device_processor": {"device": "cpu"}},
        )

    @classmethod
    def random(
        cls, family: str, processor: Preparer, cameras: Sequence[str], device: str, dtype: str, **config: Any
    ) -> "LeRobotPolicy":
        """The published size with random weights and no files; prompt and state come from `processor`, ours.

        `config` sets fields of LeRobot's configuration, such as chunk_size and num_inference_steps. `weights` gives
        them to the other side.
        """
        configs = require("lerobot.configs")
        feature, kind = configs.PolicyFeature, configs.FeatureType
        made = require(f"lerobot.policies.{family}").__dict__[f"{family.upper()}Config"](
            input_features={f"{_IMAGES}{name}": feature(kind.VISUAL, (3, 224, 224)) for name in cameras},
            push_to_hub=False,
            device=device,
            dtype=dtype,
            **config,
        )
        self = cls.__new__(cls)
        self.config, self._processor = made, processor
        with torch.device(device):
            self.policy = _policy_class(family)(made)
        randomize(self.policy, seed=0)
        set_frequencies(self.policy, "float32")
        self._before, self._after = (lambda batch: batch), torch.Tensor.cpu
        return self

    @property
    def cameras(self) -> list[str]:
        """Short camera names in the checkpoint's order."""
        return [key.removeprefix(_IMAGES) for key in self.config.image_features]

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions, float32 [chunk, action_dim]; the whole official call, its postprocessor included."""
        normalized = self._predict(self._batch(observation), noise)
        self._after(normalized)
        return _numpy(normalized[0])

    def weights(self) -> "Weights":
        """The weights as innerloop reads them from a checkpoint, so that both sides can run the same random model."""
        return Weights(self.policy.state_dict())

    def guided(
        self,
        observation: Mapping[str, Any],
        noise: np.ndarray,
        previous: np.ndarray,
        *,
        delay: int,
        horizon: int = 10,
        schedule: str = "LINEAR",
    ) -> np.ndarray:
        """Normalised actions [chunk, action_dim] under LeRobot's real-time chunking (its guidance of each solver step).

        previous float32 [n, action_dim]: normalised actions not yet executed; delay: steps that pass meanwhile.
        """
        settings = {"prefix_attention_schedule": require("lerobot.configs").RTCAttentionSchedule[schedule]}
        rtc = require("lerobot.policies.rtc.configuration_rtc").RTCConfig(execution_horizon=horizon, **settings)
        left = torch.from_numpy(np.array(previous, dtype=np.float32)).to(self.config.device)
        with mock.patch.object(self.config, "rtc_config", rtc):
            self.policy.init_rtc_processor()
            guidance = {"inference_delay": delay, "prev_chunk_left_over": left}
            actions = self._predict(self._batch(observation), noise, **guidance)[0]
        self.policy.init_rtc_processor()
        return _numpy(actions)

    def trace(self, observation: Mapping[str, Any], noise: np.ndarray) -> dict[str, np.ndarray]:
        """Every stage's result in order, for one observation, without a batch dimension, floats as float32.

        images [C,3,H,W], camera_mask [C], tokens and token_mask [capacity], state [state_dim], position_ids [T],
        vision [C,patches,width], keys and values [layers,T,heads,head_dim] (keys after rotation), velocity.<step>
        [chunk,padded], normalized and actions [chunk,action_dim]. T is all cameras in checkpoint order, then capacity.
        """
        batch = self._batch(observation)
        order = self._order(batch)
        seen: dict[str, Any] = {"vision": [], "velocity": []}
        with contextlib.ExitStack() as stack:
            self._listen(stack, seen)
            normalized = self._predict(batch, noise)
        images, mask = seen["images"]
        cache = [(layer[0], layer[1]) for layer in seen["cache"]]
        patches = seen["vision"][0].shape[1]
        rows = _rows(order, patches, batch["observation.language.tokens"].shape[1])
        result = {
            "images": torch.cat(images)[order],
            "camera_mask": torch.cat(mask)[order],
            "tokens": batch["observation.language.tokens"][0],
            "token_mask": batch["observation.language.attention_mask"][0],
            "state": batch[_STATE][0],
            "position_ids": seen["positions"][0][rows],
            "vision": torch.cat(seen["vision"])[order],
            "keys": torch.stack([keys[0].transpose(0, 1)[rows] for keys, _ in cache]),
            "values": torch.stack([values[0].transpose(0, 1)[rows] for _, values in cache]),
        }
        result |= {f"velocity.{step}": value[0] for step, value in enumerate(seen["velocity"])}
        result |= {"normalized": normalized[0], "actions": self._after(normalized)[0]}
        return {name: _numpy(value) for name, value in result.items()}

    def _batch(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """The raw observation through LeRobot's inference entry and preprocessor; a camera that is None stays absent."""
        raw = {_STATE: np.asarray(observation["state"], dtype=np.float32)}
        for name, frame in observation["images"].items():
            key = _IMAGES + name.removeprefix(_IMAGES)
            if key not in self.config.image_features:
                raise ObservationError(f"camera '{name}' is unknown to the checkpoint; it has {self.cameras}")
            if frame is not None:
                raw[key] = np.array(frame)
        prepare = require("lerobot.policies.utils").prepare_observation_for_inference
        batch: dict[str, Any] = self._before(prepare(raw, torch.device(self.config.device), observation["prompt"]))
        return batch if self._processor is None else batch | self._borrowed(self._processor.prepare(observation))

    def _borrowed(self, prepared: Any) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(prepared.inputs["tokens"]).long()[None]
        mask = torch.arange(tokens.shape[1])[None] < int(prepared.inputs["prompt_length"][0])
        state = torch.from_numpy(np.asarray(prepared.context.normalized_state, dtype=np.float32))[None]
        own = {"observation.language.tokens": tokens, "observation.language.attention_mask": mask, _STATE: state}
        return {name: value.to(self.config.device) for name, value in own.items()}

    def _predict(self, batch: dict[str, Any], noise: np.ndarray, **guidance: Any) -> torch.Tensor:
        start = torch.from_numpy(np.array(noise, dtype=np.float32)).to(self.config.device)
        start = start.reshape(1, *start.shape[-2:])
        actions: torch.Tensor = self.policy.predict_action_chunk(batch, noise=start, **guidance)
        return actions

    def _order(self, batch: Mapping[str, Any]) -> list[int]:
        """For each camera of the checkpoint, where LeRobot put it: it moves absent cameras behind present ones."""
        keys = list(self.config.image_features)
        placed = [key for key in keys if key in batch] + [key for key in keys if key not in batch]
        return [placed.index(key) for key in keys]

    def _listen(self, stack: contextlib.ExitStack, seen: dict[str, Any]) -> None:
        """Wraps the methods whose results a trace wants, until the stack closes."""
        model = self.policy.model
        towers = model.paligemma_with_expert

        def images(result: Any, _: Mapping[str, Any]) -> None:
            seen["images"] = result

        def prefix(result: Any, arguments: Mapping[str, Any]) -> None:
            if arguments["inputs_embeds"][0] is not None:
                seen["cache"], seen["positions"] = result[1], arguments["position_ids"]

        def vision(result: Any, _: Mapping[str, Any]) -> None:
            seen["vision"].append(result)

        def velocity(result: Any, _: Mapping[str, Any]) -> None:
            seen["velocity"].append(result)

        for owner, name, note in (
            (self.policy, "_preprocess_images", images),
            (towers, "embed_image", vision),
            (towers, "forward", prefix),
            (model, "denoise_step", velocity),
        ):
            stack.enter_context(mock.patch.object(owner, name, _noted(getattr(owner, name), note)))


@dataclass(frozen=True)
class Weights:
    """A TensorSource over tensors in memory."""

    tensors: Mapping[str, torch.Tensor]
    merged: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """Every tensor."""
        return tuple(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and bytes."""
        tensor = self.tensors[name]
        return TensorInfo(tuple(tensor.shape), tensor.dtype, tensor.nbytes)

    def read(self, name: str, seen: Callable[[str, torch.Tensor], None] | None = None) -> torch.Tensor:
        """One CPU tensor."""
        tensor = self.tensors[name].cpu()
        if seen is not None:
            seen(name, tensor)
        return tensor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without LeRobot's warnings, one for every patch embedding it loads."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


def set_frequencies(policy: Any, dtype: str) -> None:
    """Give every rotary embedding the frequencies that a policy of `dtype` has."""
    for module in policy.modules():
        if "inv_freq" in module._buffers:
            exact = type(module)(module.config).inv_freq
            module.inv_freq = exact.to(getattr(torch, dtype)).to(module.inv_freq.device)


def _noted(function: Any, note: Any) -> Any:
    def call(*positional: Any, **named: Any) -> Any:
        result = function(*positional, **named)
        note(result, named)
        return result

    return call


def _policy_class(family: str) -> Any:
    return getattr(require(f"lerobot.policies.{family}.modeling_{family}"), f"{family.upper()}Policy")


def _read_config(directory: Path) -> tuple[Any, Mapping[str, Mapping[str, int]] | None]:
    """LeRobot's configuration object, and our extension, which LeRobot's own reader would refuse."""
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the directory that holds it")
    fields = json.loads(path.read_text())
    if fields.get("type") not in FAMILIES:
        raise CheckpointError(f"{path} says type {fields.get('type')!r}; the LeRobot side compares {FAMILIES}")
    architecture = fields.pop(EXTENSION, None)
    require(f"lerobot.policies.{fields['type']}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return require("lerobot.configs").PreTrainedConfig.from_pretrained(folder), architecture


def _rows(order: Sequence[int], patches: int, capacity: int) -> torch.Tensor:
    """Prefix rows in checkpoint order: each camera's patches from where LeRobot put them, then the tokens."""
    cameras = [torch.arange(patches) + place * patches for place in order]
    return torch.cat([*cameras, torch.arange(capacity) + len(order) * patches])


def _numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    array: np.ndarray = (value.float() if value.is_floating_point() else value).numpy()
    return array
