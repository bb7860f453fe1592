"""PEFT LoRA adapters as a source: a tensor is merged with its adapter at the moment it is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch

from innerloop.contract.errors import CheckpointError
from innerloop.weights.source import Seen, TensorInfo, TensorSource, open_tensor_file, read_json

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_KEY = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<embedding>embedding_)(?P<table>[AB])(?:\.[^.]+)?|(?P<side>[AB])(?:\.[^.]+)?\.weight)"
)

# Settings of peft's LoraConfig under which the merged weight is not base + scale * B @ A.
_VARIANTS = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the base before training


@dataclass(frozen=True)
class _Pair:
    down: str  # A: [rank, in]
    up: str  # B: [out, rank]
    rank: int
    scale: float
    transposed: bool  # the base stores [in, out], as embeddings do


class LoraSource:
    """base + scale * B @ A for every adapted tensor, replacement for every saved module (PEFT's checkpoint format)."""

    def __init__(self, base: TensorSource, directory: Path) -> None:
        self.config = _read_config(directory)
        self._base, self._directory = base, directory
        self._adapter = open_tensor_file(_weights_file(directory))
        self._pairs: dict[str, _Pair] = {}
        self._replaced: dict[str, str] = {}
        self._match(set(base.names()))
        ranks = {name: f"rank {pair.rank} x {pair.scale:g}" for name, pair in self._pairs.items()}
        self.merged: Mapping[str, str] = {**base.merged, **ranks, **dict.fromkeys(self._replaced, "replaced")}

    def names(self) -> tuple[str, ...]:
        """The base's tensors; an adapter adds none."""
        return self._base.names()

    def info(self, name: str) -> TensorInfo:
        """The base's shape; merged tensors are float32, so that they are rounded once."""
        info = self._base.info(name)
        if name in self._replaced:
            return self._adapter.info(self._replaced[name])
        return info._replace(dtype=torch.float32) if name in self._pairs else info

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """The base's tensor, merged or replaced. `seen` gets the stored parts, the adapter's as `adapter:<key>`."""
        if name in self._replaced:
            return self._part(self._replaced[name], seen)
        base = self._base.read(name, seen)
        pair = self._pairs.get(name)
        if pair is None:
            return base
        down, up = self._part(pair.down, seen).float(), self._part(pair.up, seen).float()
        delta = up.reshape(up.shape[0], -1) @ down.reshape(down.shape[0], -1)
        if pair.transposed:
            delta = delta.T
        return base.float() + pair.scale * delta.reshape(base.shape)

    def _part(self, key: str, seen: Seen | None) -> torch.Tensor:
        tensor = self._adapter.read(key)
        if seen is not None:
            seen(f"adapter:{key}", tensor)
        return tensor

    def _match(self, known: set[str]) -> None:
        sides: dict[str, dict[str, str]] = {}
        embeddings: set[str] = set()
        problems: list[str] = []
        for key in self._adapter.names():
            name = key.removeprefix("base_model.model.")
            match = _KEY.fullmatch(name)
            if match:
                sides.setdefault(match["module"], {})[match["side"] or match["table"]] = key
                embeddings.update([match["module"]] if match["embedding"] else [])
                continue
            target = re.sub(r"\.modules_to_save(\.[^.]+)?(?=\.)", "", name)
            if target in known:
                self._replaced[target] = key
                problems += self._replacement_problem(target, key)
            else:
                problems.append(f"'{key}' matches no tensor of the base")
        for module, keys in sides.items():
            names = [name for name in (f"{module}.weight", module) if name in known]
            if set(keys) != {"A", "B"}:
                problems.append(f"'{module}' has lora_{'/'.join(keys)} only, its other half is missing")
            elif not names:
                problems.append(f"'{module}' matches no tensor of the base")
            else:
                pair = self._pair(module, keys, module in embeddings)
                self._pairs[names[0]] = pair
                problems += self._pair_problem(names[0], pair)
        if problems or not (self._pairs or self._replaced):
            raise CheckpointError(
                f"the adapter {self._directory} does not fit its base, it may belong to another model:\n  "
                + "\n  ".join(problems or ["it holds no tensors"])
            )

    def _pair(self, module: str, keys: Mapping[str, str], embedding: bool) -> _Pair:
        rank = self._adapter.info(keys["A"]).shape[0]
        configured = _pattern(self.config.get("rank_pattern"), module, self.config.get("r"))
        if configured != rank:
            raise CheckpointError(
                f"{self._directory / CONFIG} says rank {configured} for '{module}', its tensors have {rank}: "
                "the two files are from different adapters"
            )
        alpha = float(_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8)))
        scale = alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
        return _Pair(keys["A"], keys["B"], rank, scale, embedding or bool(self.config.get("fan_in_fan_out")))

    def _pair_problem(self, target: str, pair: _Pair) -> list[str]:
        down, up = self._adapter.info(pair.down).shape, self._adapter.info(pair.up).shape
        base = self._base.info(target)
        rows, width = base.shape[0], prod(base.shape[1:])
        outer = (width, rows) if pair.transposed else (rows, width)
        if up[1] == pair.rank and (up[0], prod(down[1:])) == outer:
            return []
        return [f"'{target}' is {list(base.shape)} in the base, but lora_A is {list(down)} and lora_B {list(up)}"]

    def _replacement_problem(self, target: str, key: str) -> list[str]:
        mine, theirs = self._adapter.info(key).shape, self._base.info(target).shape
        return [] if mine == theirs else [f"'{target}' is {list(theirs)} in the base, {list(mine)} in the adapter"]


def holds_adapter(directory: Path) -> bool:
    """Whether adapter files are here; decided by files, never by a flag in a config."""
    return (directory / CONFIG).is_file() or any((directory / name).is_file() for name in WEIGHTS)


def _read_config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(
            f"{directory / CONFIG} describes an adapter of type {kind}, only LORA is supported: "
            "merge it into its base with peft and load the result"
        )
    variants = [name for name in _VARIANTS if config.get(name)]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        variants.append(f"init_lora_weights={config['init_lora_weights']}")
    if variants:
        raise CheckpointError(
            f"{directory / CONFIG} sets {', '.join(variants)}, a variant of LoRA that is not supported: "
            "merge it into its base with peft and load the result"
        )
    return config


def _weights_file(directory: Path) -> Path:
    for name in WEIGHTS:
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(
        f"{directory} has {CONFIG} but no {WEIGHTS[0]}: copy it there, or remove {CONFIG} if the weights are merged"
    )


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?(?:{pattern})", module):
            return value
    return default
