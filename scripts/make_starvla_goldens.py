"""Writes tests/golden/starvla.npz: what starVLA's own modules compute on the tiny runs, numbers alone.

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

    vlm = place / starvla.VLM
    qwen.write(vlm, "qwen3_vl", seed=1)
    (vlm / "chat_template.jinja").write_text(CHAT)
    special = {"additional_special_tokens": list(qwen.SPECIAL[1:]), "pad_token": qwen.SPECIAL[0]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor", **special}
    (vlm / "tokenizer_config.json").write_text(json.dumps(kind))
    images = {**qwen.IMAGES, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    images["image_processor_type"] = "Qwen2VLImageProcessor"
    (vlm / "preprocessor_config.json").write_text(json.dumps(images))
    (vlm / "video_preprocessor_config.json").write_text(
        json.dumps({**images, "video_processor_type": "Qwen3VLVideoProcessor"})
    )
    config = OmegaConf.create(starvla.configuration(run))
    config.framework.qwenvl.base_vlm = str(vlm)
    apply_config_compat(config)
    framework = build_framework(config).float().eval()
    weights = {name: torch.from_numpy(value) for name, value in starvla.tensors(run).items()}
    framework.load_state_dict(weights, strict=True)
    return framework


def predict(framework: Any, run: starvla.Run, case: starvla.Case) -> np.ndarray:
    """Normalised actions [chunk, dims] of one case."""
    seen = starvla.observation(run, case)
    example = {"image": list(seen["images"].values()), "lang": seen["prompt"]}
    if run.data.get("include_state"):
        example["state"] = seen["normalized_state"][None]
    start = torch.from_numpy(starvla.noise(run, case))[None]
    with mock.patch.object(torch, "randn", return_value=start):
        found = framework.predict_action(examples=[example])["normalized_actions"]
    return np.asarray(found[0], np.float32)


def main() -> None:
    """Every case of every run."""
    goldens = {}
    for name, run in starvla.RUNS.items():
        if name not in starvla.CASES:
            continue
        with tempfile.TemporaryDirectory() as place:
            framework = build(run, Path(place))
            for index, case in enumerate(starvla.CASES[name]):
                goldens[f"{name}.{index}"] = predict(framework, run, case)
    np.savez_compressed(GOLDEN, **goldens)
    print(f"{GOLDEN}: {len(goldens)} cases, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
