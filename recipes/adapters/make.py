"""Writes tests/golden/adapters: small adapters saved by PEFT, and their bases as PEFT itself merges them.

Needs peft, transformers and accelerate. Usage: python recipes/adapters/make.py
"""

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "adapters"


class Toy(nn.Module):
    """One layer of every kind that an adapter can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.patch = nn.Conv2d(3, 6, 2)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(6, 8), "k_proj": nn.Linear(6, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Only PEFT's wrapping needs a forward; nothing calls it."""
        return self.head(self.layers[0]["q_proj"](self.embed(tokens)))


VARIANTS = {
    "plain": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "k_proj", "embed", "patch"],
        "modules_to_save": ["head"],
        "rank_pattern": {"k_proj": 3},
        "alpha_pattern": {"layers.1.k_proj": 5},
    },
    "rslora": {"r": 4, "lora_alpha": 3, "target_modules": r".*\.(q|k)_proj", "use_rslora": True},
}


def main() -> None:
    """One directory a variant: base.safetensors, adapter/, merged.safetensors."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, settings in VARIANTS.items():
        torch.manual_seed(0)
        model = Toy()
        directory = GOLDEN / name
        directory.mkdir(parents=True)
        save_file(model.state_dict(), directory / "base.safetensors")
        adapted = get_peft_model(model, LoraConfig(**settings))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_" in key or "modules_to_save" in key:
                    parameter.copy_(torch.randn(parameter.shape) * 0.5)
        adapted.save_pretrained(directory / "adapter")
        (directory / "adapter" / "README.md").unlink(missing_ok=True)
        merged = {key: tensor.contiguous() for key, tensor in adapted.merge_and_unload().state_dict().items()}
        save_file(merged, directory / "merged.safetensors")


if __name__ == "__main__":
    main()
