"""Widths and depths of the shared towers, as plain data read from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from innerloop.contract import CheckpointError


@dataclass(frozen=True)
class VisionSizes:
    """A SigLIP tower: square images of image_size pixels cut into patch_size patches."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    patch_size: int
    image_size: int

    @property
    def tokens(self) -> int:
        """Tokens an image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class DecoderSizes:
    """A Gemma decoder; vocab_size is 0 where there is no embedding."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


# openpi src/openpi/models/gemma.py get_config; PaliGemma vocabulary 257152
PUBLISHED = {
    "gemma_300m": DecoderSizes(1024, 18, 4096, 8, 1, 256),
    "gemma_2b": DecoderSizes(2048, 18, 16384, 8, 1, 256),
}
PALIGEMMA_VOCABULARY = 257152
# SigLIP-So400m/14, openpi src/openpi/models/siglip.py
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "layers": 27, "heads": 16, "patch_size": 14}


def published(variant: str) -> DecoderSizes:
    """Sizes of a published Gemma variant by openpi's name for it."""
    if variant not in PUBLISHED:
        raise CheckpointError(
            f"config.json names the Gemma variant '{variant}'; known are {sorted(PUBLISHED)}. "
            "A checkpoint of another size states its sizes under 'innerloop_architecture' (docs/checkpoints.md)."
        )
    return PUBLISHED[variant]


def from_mapping(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """VisionSizes or DecoderSizes from an `innerloop_architecture` section; wrong keys are named."""
    fields = set(kind.__dataclass_fields__)
    required = {name for name, f in kind.__dataclass_fields__.items() if f.default is f.default_factory}
    extra, missing = sorted(set(values) - fields), sorted(required - set(values))
    if extra or missing:
        raise CheckpointError(
            f"config.json {where}: unknown keys {extra}, missing keys {missing}; expected {sorted(fields)}"
        )
    bad = {k: v for k, v in values.items() if not isinstance(v, int) or isinstance(v, bool) or v <= 0}
    if bad:
        raise CheckpointError(f"config.json {where}: sizes must be positive whole numbers, got {bad}")
    return kind(**values)
