"""Writes tests/golden/starvla.npz and qwen.npz: what starVLA's own modules compute on the tiny runs, and transformers
4.57 on the tiny Qwen3 and Qwen3-VL, numbers alone.

Run from the repository's root, with a checkout of github.com/starVLA/starVLA (0ed0aad) on PYTHONPATH, in an environment
with transformers 4.57.1, torch, torchvision, diffusers 0.35, omegaconf, accelerate and scipy:
python -m scripts.make_starvla_goldens
"""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from recipes.tiny import qwen, starvla

GOLDEN = Path("tests/golden/starvla.npz")
LEVELS = Path("tests/golden/qwen.npz")
EVERY = 4  # tokens whose hidden states are kept
ANSWER = 10  # tokens
# What Qwen3-VL's chat template does to one user turn of images and text.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(run: starvla.Run, place: Path) -> Any:
    """The official framework with the tiny weights, in float32."""
    from omegaconf import OmegaConf
    from starVLA.model.framework.base_framework import build_framework  # type: ignore[import-not-found]
    from starVLA.model.framework.share_tools import apply_config_compat  # type: ignore[import-not-found]

    vlm = describe(place / starvla.VLM, "qwen3_vl", seed=1)
    config = OmegaConf.create(starvla.configuration(run))
    config.framework.qwenvl.base_vlm = str(vlm)
    apply_config_compat(config)
    # no FAST tokenizer: what is kept of QwenFast is the answer's ids
    with mock.patch("starVLA.model.modules.action_model.fast_ActionHeader.AutoProcessor"):
        framework = build_framework(config).float().eval()
    weights = {name: torch.from_numpy(value) for name, value in starvla.tensors(run).items()}
    framework.load_state_dict(weights, strict=True)
    return framework


def describe(directory: Path, kind: str, seed: int, tied: bool = True) -> Path:
    """A tiny directory with what transformers' processors want beside the weights."""
    qwen.write(directory, kind, seed, tied)
    special = {"additional_special_tokens": list(qwen.SPECIAL[1:]), "pad_token": qwen.SPECIAL[0]}
    mine = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor", **special}
    images = {**qwen.IMAGES, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    described = {
        "tokenizer_config.json": mine,
        "preprocessor_config.json": {**images, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**images, "video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, content in described.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(CHAT)
    return directory


def level(turn: qwen.Turn, place: Path) -> dict[str, np.ndarray]:
    """Hidden states of some tokens after each layer, the answer's ids, and some patches, of one turn."""
    from PIL import Image
    from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

    directory = describe(place, turn.kind, turn.seed, turn.tied)
    content = [{"type": "image", "image": Image.fromarray(image)} for image in qwen.pictures(turn)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": turn.text}]}]
    vision = turn.kind == "qwen3_vl"
    processor = (AutoProcessor if vision else AutoTokenizer).from_pretrained(directory)
    kind = Qwen3VLForConditionalGeneration if vision else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    inputs.pop("token_type_ids", None)
    layers: list[torch.Tensor] = []
    decoder = model.model.language_model if vision else model.model
    for layer in decoder.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: layers.append(out))
    with torch.no_grad():
        model(**inputs, output_hidden_states=True)
        # DeepStack is added to the tensors that the hooks saw, in place
        hidden = torch.stack([out[0] for out in layers[: len(decoder.layers)]])
        answer = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False, eos_token_id=[], pad_token_id=0)
    tokens = inputs["input_ids"].shape[1]
    found = {
        "hidden": hidden[:, ::EVERY].numpy(),
        "ids": inputs["input_ids"][0].numpy(),
        "answer": answer[0, tokens:].numpy(),
    }
    if "pixel_values" in inputs:
        found["pixels"] = np.rint((inputs["pixel_values"].numpy() + 1) * 127.5).astype(np.uint8)[::EVERY]
    return found


def predict(framework: Any, run: starvla.Run, case: starvla.Case) -> np.ndarray:
    """Normalised actions [chunk, dims] of one case; for QwenFast, the first ids of its answer."""
    seen = starvla.observation(run, case)
    if run.framework == "QwenFast":
        return answer(framework, seen)
    example = {"image": list(seen["images"].values()), "lang": seen["prompt"]}
    if run.data.get("include_state"):
        example["state"] = seen["normalized_state"][None]
    start = torch.from_numpy(starvla.noise(run, case))[None]
    with mock.patch.object(torch, "randn", return_value=start):
        found = framework.predict_action(examples=[example])["normalized_actions"]
    return np.asarray(found[0], np.float32)


def answer(framework: Any, seen: dict[str, Any]) -> np.ndarray:
    """Ids of a greedy answer, [ANSWER]."""
    from deployment.model_server.tools.image_tools import to_pil_preserve  # type: ignore[import-not-found]

    interface = framework.qwen_vl_interface
    images = [to_pil_preserve(list(seen["images"].values()))]
    inputs = interface.build_qwenvl_inputs(images=images, instructions=[seen["prompt"]])
    with torch.no_grad():
        ids = interface.model.generate(
            **inputs, max_new_tokens=ANSWER, do_sample=False, eos_token_id=[], pad_token_id=0
        )
    return np.asarray(ids[0, inputs["input_ids"].shape[1] :], np.int32)


def main() -> None:
    """Every case of every run."""
    goldens: dict[str, Any] = {}
    for name, run in starvla.RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            framework = build(run, Path(place))
            for index, case in enumerate(starvla.CASES[name]):
                goldens[f"{name}.{index}"] = predict(framework, run, case)
    np.savez_compressed(GOLDEN, **goldens)
    levels: dict[str, Any] = {}
    for index, turn in enumerate(qwen.TURNS):
        with tempfile.TemporaryDirectory() as place:
            levels |= {f"{index}.{name}": value for name, value in level(turn, Path(place)).items()}
    np.savez_compressed(LEVELS, **levels)
    print(f"{LEVELS}: {len(qwen.TURNS)} turns, {LEVELS.stat().st_size} bytes")
    print(f"{GOLDEN}: {len(goldens)} cases, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
