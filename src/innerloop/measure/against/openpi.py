"""Physical Intelligence's own PyTorch pi0 and pi0.5 (github.com/Physical-Intelligence/openpi), where it is installed."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from innerloop.contract.errors import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.engine.placement import Placement
from innerloop.measure.against.importing import imported
from innerloop.measure.against.lerobot import set_frequencies
from innerloop.measure.against.weights import share
from innerloop.measure.interpreted import prepare

log = logging.getLogger(__name__)

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_REMEDY = (
    "openpi is not on PyPI: clone https://github.com/Physical-Intelligence/openpi, follow 'PyTorch Support' in its README "
    "(uv sync, then copy its transformers_replace over transformers 4.53.2), and install innerloop into that environment"
)


class OpenpiPolicy:
    """openpi's model on the weights, noise, frames and tokens of a policy of ours, loaded with kernels="reference".

    As its inference script runs it: three cameras always, compiled by its own default (`pytorch_compile_mode`) at the
    first decision. Its host side (tokens, state, names) needs a training configuration, so ours stands in for it.
    """

    name = "openpi"

    def __init__(self, policy: LoadedPolicy) -> None:
        self.policy = policy
        self._cameras = _require("models_pytorch.preprocessing_pytorch").IMAGE_KEYS
        if len(policy.config.cameras) > len(self._cameras):
            raise InnerloopError(
                f"openpi takes {len(self._cameras)} cameras, this policy has {list(policy.config.cameras)}; "
                "leave openpi out of --against, or bench fewer views"
            )
        self._model: Any = _build(policy.config, policy.placement)
        share(policy, self._model)
        set_frequencies(self._model, str(policy.config.rotary_dtype).removeprefix("torch."))

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions, float32 [chunk, action_dim]; the whole call, un-normalisation included."""
        prepared, device = prepare(self.policy, observation, noise), self.policy.placement.device
        start = torch.from_numpy(np.array(prepared.inputs["noise"], np.float32)).to(device)[None]
        given = _require("models.model").Observation.from_dict(self._given(prepared.inputs, prepared.context))
        actions = self._model.sample_actions(device, given, noise=start, num_steps=self.policy.config.steps)
        normalized: np.ndarray = actions[0].float().numpy(force=True)
        self.policy.processor.finish(normalized, prepared.context)
        return normalized

    def _given(self, inputs: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Our plan's inputs as openpi's Observation takes them: a batch of one, on the device."""
        device, config = self.policy.placement.device, self.policy.config
        sizes, present = inputs["frame_sizes"], inputs["camera_mask"]
        state = np.zeros(config.max_state_dim, np.float32)
        known = np.asarray(context.normalized_state, np.float32)
        state[: len(known)] = known
        images, masks = {}, {}
        for place, name in enumerate(self._cameras):
            there = place < len(config.cameras) and bool(present[place])
            images[name] = self._picture(inputs["frames"][place], *sizes[place]) if there else self._nothing()
            masks[name] = torch.tensor([there], device=device)
        tokens = torch.from_numpy(inputs["tokens"]).to(device)[None]
        length = int(inputs["prompt_length"][0])
        return {
            "image": images,
            "image_mask": masks,
            "state": torch.from_numpy(state).to(device)[None],
            "tokenized_prompt": tokens,
            "tokenized_prompt_mask": torch.arange(tokens.shape[1], device=device)[None] < length,
        }

    def _picture(self, frame: np.ndarray, height: int, width: int) -> torch.Tensor:
        """float32 [1, size, size, 3] in [-1, 1]; openpi's own resize, which gives up the batch axis of one."""
        size = self.policy.config.vision.image_size
        pixels = torch.from_numpy(frame[: height * width * 3].reshape(1, height, width, 3))
        image: torch.Tensor = pixels.to(self.policy.placement.device).float() / 255.0 * 2.0 - 1.0
        if (height, width) != (size, size):
            image = _require("shared.image_tools").resize_with_pad_torch(image, size, size)
        return image.reshape(1, size, size, 3)

    def _nothing(self) -> torch.Tensor:
        size = self.policy.config.vision.image_size
        return torch.full((1, size, size, 3), -1.0, device=self.policy.placement.device)


def _build(config: Any, placement: Placement) -> nn.Module:
    """PI0Pytorch with weights still to be given."""
    chosen = _require("models.pi0_config").Pi0Config(
        dtype=_DTYPES[placement.precision],
        action_dim=config.max_action_dim,
        action_horizon=config.chunk,
        max_token_len=config.prompt_capacity,
        pi05=config.family == "pi05",
    )
    if chosen.pytorch_compile_mode is not None:
        log.info("openpi: compiles itself (%s) at the first decision: minutes", chosen.pytorch_compile_mode)
    build, before = _require("models_pytorch.pi0_pytorch").PI0Pytorch, torch.get_float32_matmul_precision()
    try:
        with torch.device(placement.device):
            model: nn.Module = build(chosen)
    except ValueError as error:  # so it says that its transformers is not the patched one
        raise InnerloopError(f"openpi does not start here ({error}); {_REMEDY}") from error
    finally:
        torch.set_float32_matmul_precision(before)  # it sets TF32 for the whole process, ours too
    return model


def _require(module: str) -> Any:
    return imported(f"openpi.{module}", _REMEDY)
