"""openpi's JAX checkpoints: stacked arrays in Orbax's format, presented under openpi's PyTorch names.

Arrays are read by TensorStore, Orbax's storage library, one at a time on the CPU: neither JAX nor the topology
of the machine that saved them is needed. Meaning of names and axes: openpi src/openpi/models/{gemma,siglip,lora}.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from innerloop.contract.errors import CheckpointError
from innerloop.weights.arrays import open_arrays
from innerloop.weights.source import Seen, TensorInfo

Build = Callable[[torch.Tensor], torch.Tensor]
Rules = dict[str, tuple[tuple[str, Build], ...]]  # stored array -> names made of it


class _Piece(NamedTuple):
    """One PyTorch tensor: a function of one layer of one stored array."""

    array: str
    layer: int | None
    build: Build


def is_orbax(directory: Path) -> bool:
    """Whether this is a step directory with params/, or params/ itself."""
    return any((place / "_METADATA").is_file() for place in (directory, directory / "params"))


def open_orbax(directory: Path) -> "OrbaxSource":
    """The params of a step directory, or of params/ itself."""
    return OrbaxSource(directory if (directory / "_METADATA").is_file() else directory / "params")


class OrbaxSource:
    """openpi parameters under the names of openpi's PyTorch model; LoRA parameters are merged when read."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._arrays = open_arrays(directory)
        self._pieces: dict[str, _Piece] = {}
        for key in self._arrays:
            if _adapted(key) not in self._arrays:
                self._pieces.update(self._present(key))
        self.merged: Mapping[str, str] = {
            name: f"rank {self._arrays[_adapters(piece.array)[0]].shape[-1]} x 1"
            for name, piece in self._pieces.items()
            if self._has_adapter(piece.array)
        }
        self._held: tuple[str, torch.Tensor] | None = None
        self._last = {piece.array: name for name, piece in self._pieces.items()}

    def names(self) -> tuple[str, ...]:
        """Grouped by stored array, so that each array is read once."""
        return tuple(self._pieces)

    def info(self, name: str) -> TensorInfo:
        """Shape as presented, dtype and size from the array's header."""
        piece = self._pieces[name]
        array = self._arrays[piece.array]
        shape = tuple(array.shape if piece.layer is None else array.shape[1:])
        dtype = torch.float32 if self._has_adapter(piece.array) else _dtype(array)
        built = piece.build(torch.empty(shape, dtype=dtype, device="meta"))
        return TensorInfo(tuple(built.shape), dtype, built.numel() * dtype.itemsize)

    def read(self, name: str, seen: Seen | None = None) -> torch.Tensor:
        """One presented tensor; the stored array that holds it stays in memory until its last one."""
        piece = self._pieces[name]
        tensor = self._layer(piece.array, piece.layer)
        if self._last[piece.array] == name:
            self._held = None
        if seen is not None:
            seen(name, piece.build(tensor))
        if self._has_adapter(piece.array):
            down, up = (self._read(key, piece.layer) for key in _adapters(piece.array))
            if seen is not None:
                seen(f"adapter:{name}.lora_a", down)
                seen(f"adapter:{name}.lora_b", up)
            tensor = tensor.float() + _delta(piece.array, down.float(), up.float())
        return piece.build(tensor)

    def _present(self, key: str) -> dict[str, _Piece]:
        rules = _RULES.get(key)
        if rules is None:
            return {key.replace("/", "."): _Piece(key, None, _same)}
        layers = self._arrays[key].shape[0] if any("{layer}" in name for name, _ in rules) else None
        if layers is None:
            return {name: _Piece(key, None, build) for name, build in rules}
        return {name.format(layer=n): _Piece(key, n, build) for n in range(layers) for name, build in rules}

    def _has_adapter(self, key: str) -> bool:
        return all(adapter in self._arrays for adapter in _adapters(key))

    def _layer(self, key: str, layer: int | None) -> torch.Tensor:
        if self._held is None or self._held[0] != key:
            self._held = None
            self._held = (key, self._read(key, None))
        return self._held[1] if layer is None else self._held[1][layer]

    def _read(self, key: str, layer: int | None) -> torch.Tensor:
        array = self._arrays[key]
        try:
            values = (array if layer is None else array[layer]).read().result()
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: array '{key}' cannot be read ({str(error)[:200]}): download the checkpoint again"
            ) from error
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(values)


def _dtype(array: Any) -> torch.dtype:
    dtype = getattr(torch, str(array.dtype.name), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"an Orbax array has dtype {array.dtype.name}, which cannot be read")
    return dtype


def _adapters(key: str) -> tuple[str, str]:
    stem = f"{key.removesuffix('/w')}/lora_" if key.endswith("/w") else f"{key}_lora_"
    return f"{stem}a", f"{stem}b"


def _adapted(key: str) -> str:
    """The array that a LoRA parameter adapts; for any other key a name that no array has."""
    stem, separator, _ = key.rpartition("/lora_")
    if separator:
        return f"{stem}/w"
    return key.rpartition("_lora_")[0]


def _delta(key: str, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """a @ b in the weight's own axes. openpi's two LoRA variants have alpha = rank, so the scale is 1."""
    if "/attn_vec_einsum" not in key:
        return down @ up
    # Here the axis that LoRA replaces is not the only contracted one: heads are summed before b and again in it.
    heads, width, rank = down.shape
    return (down.reshape(heads * width, rank) @ up.sum(0)).reshape(heads, width, -1)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def _heads_out(tensor: torch.Tensor) -> torch.Tensor:
    """[heads, in, width] -> [heads * width, in]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def _heads_in(tensor: torch.Tensor) -> torch.Tensor:
    """[heads, width, out] -> [out, heads * width]."""
    return tensor.reshape(-1, tensor.shape[2]).T


def _vision_rules() -> Rules:
    vision = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
    block, layer = "PaliGemma/img/Transformer/encoderblock", f"{vision}.encoder.layers.{{layer}}"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    rules: Rules = {
        "PaliGemma/img/embedding/kernel": (
            (f"{vision}.embeddings.patch_embedding.weight", lambda t: t.permute(3, 2, 0, 1)),
        ),
        "PaliGemma/img/embedding/bias": ((f"{vision}.embeddings.patch_embedding.bias", _same),),
        "PaliGemma/img/pos_embedding": (
            (f"{vision}.embeddings.position_embedding.weight", lambda t: t.reshape(-1, t.shape[-1])),
        ),
        f"{attention}/out/kernel": ((f"{layer}.self_attn.out_proj.weight", _heads_in),),
        f"{attention}/out/bias": ((f"{layer}.self_attn.out_proj.bias", _same),),
    }
    for theirs, ours in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules[f"{attention}/{theirs}/kernel"] = (
            (f"{layer}.self_attn.{ours}.weight", lambda t: t.reshape(t.shape[0], -1).T),
        )
        rules[f"{attention}/{theirs}/bias"] = ((f"{layer}.self_attn.{ours}.bias", _flat),)
    norms = [(f"{block}/LayerNorm_{n}", f"{layer}.layer_norm{n + 1}") for n in (0, 1)]
    for theirs, ours in [*norms, ("PaliGemma/img/Transformer/encoder_norm", f"{vision}.post_layernorm")]:
        rules[f"{theirs}/scale"] = ((f"{ours}.weight", _same),)
        rules[f"{theirs}/bias"] = ((f"{ours}.bias", _same),)
    denses = [(f"{block}/MlpBlock_0/Dense_{n}", f"{layer}.mlp.fc{n + 1}") for n in (0, 1)]
    head = ("PaliGemma/img/head", "paligemma_with_expert.paligemma.model.multi_modal_projector.linear")
    return rules | _dense_rules([*denses, head])


def _decoder_rules(expert: str, model: str) -> Rules:
    stack, layer = "PaliGemma/llm/layers", f"{model}.layers.{{layer}}"
    rules: Rules = {
        f"{stack}/attn/q_einsum{expert}/w": ((f"{layer}.self_attn.q_proj.weight", _heads_out),),
        f"{stack}/attn/kv_einsum{expert}/w": (
            (f"{layer}.self_attn.k_proj.weight", lambda t: _heads_out(t[0])),
            (f"{layer}.self_attn.v_proj.weight", lambda t: _heads_out(t[1])),
        ),
        f"{stack}/attn/attn_vec_einsum{expert}/w": ((f"{layer}.self_attn.o_proj.weight", _heads_in),),
        f"{stack}/mlp{expert}/gating_einsum": (
            (f"{layer}.mlp.gate_proj.weight", lambda t: t[0].T),
            (f"{layer}.mlp.up_proj.weight", lambda t: t[1].T),
        ),
        f"{stack}/mlp{expert}/linear": ((f"{layer}.mlp.down_proj.weight", _transposed),),
    }
    norms = (
        (f"{stack}/pre_attention_norm{expert}", f"{layer}.input_layernorm"),
        (f"{stack}/pre_ffw_norm{expert}", f"{layer}.post_attention_layernorm"),
        (f"PaliGemma/llm/final_norm{expert}", f"{model}.norm"),
    )
    rules |= {f"{theirs}/scale": ((f"{ours}.weight", _same),) for theirs, ours in norms}
    return rules | _dense_rules([(f"{theirs}/Dense_0", f"{ours}.dense") for theirs, ours in norms])


def _dense_rules(pairs: list[tuple[str, str]]) -> Rules:
    rules: Rules = {f"{theirs}/kernel": ((f"{ours}.weight", _transposed),) for theirs, ours in pairs}
    return rules | {f"{theirs}/bias": ((f"{ours}.bias", _same),) for theirs, ours in pairs}


# openpi src/openpi/models/pi0.py names the projections; state_proj and action_time_* are pi0's, time_mlp_* pi0.5's.
_LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
_HEADS = ("state_proj", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
_RULES: Rules = {
    **_vision_rules(),
    **_decoder_rules("", _LANGUAGE),
    **_decoder_rules("_1", "paligemma_with_expert.gemma_expert.model"),
    **_dense_rules([(name, name) for name in (*_HEADS, "action_time_mlp_in", "action_time_mlp_out")]),
    "PaliGemma/llm/embedder/input_embedding": ((f"{_LANGUAGE}.embed_tokens.weight", _same),),
}
