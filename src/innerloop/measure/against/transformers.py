"""transformers' Qwen3-VL below our own action head in plain torch: what replacing only the head would leave."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from innerloop.blocks.qwen3 import Reading
from innerloop.blocks.qwen3_vl import Qwen3VLSizes
from innerloop.contract.stage import Stage, Tensors
from innerloop.engine import LoadedPolicy
from innerloop.measure.against.chat_inputs import chat_inputs
from innerloop.measure.against.importing import imported
from innerloop.measure.against.weights import share
from innerloop.measure.interpreted import Interpreted, prepare

_REMEDY = "pip install 'transformers>=4.57,<5.6'"
_THEIRS = ("grid", "vision")  # stages whose work is done by transformers


class TransformersPolicy:
    """The vision-language model from transformers, eager, as deep as it is read; its layers' outputs go to our head.

    On the weights of a policy loaded with kernels="reference". Outputs are taken before the final norm and after
    DeepStack's addition, which is what transformers 4.57 called hidden states, and what these heads were trained on.
    """

    name = "transformers"

    def __init__(self, policy: LoadedPolicy) -> None:
        backbone: Any = policy.model.backbone
        self.policy, self._layers = policy, list[torch.Tensor]()
        self._model = _build(backbone.sizes, policy)
        table = policy.family.name_table(policy.config)
        share(policy, self._model, table.targets["backbone.vision.position"][0].removesuffix("visual.pos_embed.weight"))
        self._listen()
        backbone.language.outputs = self._outputs
        self._head = Interpreted(policy, _emptied)

    def infer(self, observation: Mapping[str, Any], noise: np.ndarray) -> np.ndarray:
        """Normalised actions [chunk, max_action_dim]; the whole call, un-normalisation included."""
        prepared = prepare(self.policy, observation, noise)
        with torch.no_grad(), self._head.stream():
            self._layers.clear()
            self._model(**self._given(prepared.inputs))
        normalized = self._head.run(prepared)
        self.policy.processor.finish(normalized, prepared.context)
        return normalized

    def _given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = chat_inputs(inputs, self._model.config.vision_config)
        ids = given["input_ids"]
        image = torch.from_numpy(inputs["visual_rows"][: ids.shape[1]] >= 0)[None]
        first = int(image[0].int().argmax())
        config = self._model.config  # these two ids are the tokenizer's, which made-up vocabularies have elsewhere
        config.image_token_id, config.vision_start_token_id = int(ids[0, first]), int(ids[0, first - 1])
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:  # since transformers 5
            given["mm_token_type_ids"] = image.int()
        device = self.policy.placement.device
        return {name: value.to(device) for name, value in given.items()} | {"use_cache": False}

    def _listen(self) -> None:
        """What goes into the second layer and on, and into the final norm, is what comes out of every layer."""

        def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._layers.append(positional[0] if positional else named["hidden_states"])

        language: Any = self._model.language_model
        for module in (*language.layers[1:], language.norm):
            module.register_forward_pre_hook(note, with_kwargs=True)

    def _outputs(self, x: torch.Tensor, reading: Reading, deepstack: Any = ()) -> Iterator[torch.Tensor]:
        """Stands for blocks.qwen3.Qwen3.outputs; the rows that no token fills are zero."""
        for layer in self._layers:
            yield F.pad(layer, (0, 0, 0, x.shape[1] - layer.shape[1]))


def _emptied(stage: Stage) -> Stage:
    def nothing(_: Tensors) -> None: ...

    return replace(stage, run=nothing) if stage.name in _THEIRS else stage


def _build(sizes: Qwen3VLSizes, policy: LoadedPolicy) -> Any:
    transformers = imported("transformers", _REMEDY)
    imported("transformers.models.qwen3_vl", _REMEDY)
    config = transformers.Qwen3VLConfig(text_config=_text(sizes), vision_config=_vision(sizes))
    with torch.device(policy.placement.device):
        return transformers.AutoModel.from_config(config, dtype=policy.placement.dtype)


def _text(sizes: Qwen3VLSizes) -> dict[str, Any]:
    s = sizes.language
    rotary = {"mrope_interleaved": True, "mrope_section": list(s.sections), "rope_type": "default"}
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.width,
        "intermediate_size": s.mlp_dim,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": rotary,
    }


def _vision(sizes: Qwen3VLSizes) -> dict[str, Any]:
    s = sizes.vision
    return {
        "depth": s.layers,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_heads": s.heads,
        "patch_size": s.patch_size,
        "spatial_merge_size": s.merge,
        "temporal_patch_size": s.temporal,
        "out_hidden_size": s.out,
        "num_position_embeddings": s.side**2,
        "deepstack_visual_indexes": list(s.deepstack),
    }
