"""Qwen3 and Qwen3-VL on their own, below the policies that are built on them: hidden states, and greedy text.

Both levels read a Hugging Face directory: config.json, safetensors, tokenizer.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from innerloop.blocks import qwen3_names, qwen3_vl
from innerloop.blocks.qwen3 import Qwen3, Qwen3Head, Qwen3Sizes, Reading, rotary
from innerloop.blocks.qwen3_vision import Qwen3Vision, Qwen3VisionSizes
from innerloop.contract import Buffer, CheckpointError, ObservationError
from innerloop.engine import Placement, place
from innerloop.kernels import embedding, use_kernels
from innerloop.process.qwen3vl import ChatTokenizer, Encoder, ImageRules, Slots, image_rules
from innerloop.runtime.windows import Value
from innerloop.weights import Account, NameTable, load_weights, open_checkpoint
from innerloop.weights.fields import Fields

END = "<|im_end|>"


class LevelModel(nn.Module):
    """A decoder with its vocabulary head, and a vision tower where the checkpoint has one."""

    def __init__(self, language: Qwen3Sizes, vision: Qwen3VisionSizes | None) -> None:
        super().__init__()
        self.language, self.head = Qwen3(language), Qwen3Head(language)
        self.vision = None if vision is None else Qwen3Vision(vision)


@dataclass
class Level:
    """One loaded level."""

    model: LevelModel
    placement: Placement
    tokenizer: ChatTokenizer
    rules: ImageRules
    ends: frozenset[int]  # ids that end an answer
    account: Account

    def hidden(self, text: str, images: Sequence[np.ndarray] = ()) -> np.ndarray:
        """float32 [layers, tokens, width]: each layer's output before the final norm, after its DeepStack addition."""
        with torch.no_grad(), use_kernels(self.placement.kernels):
            b = self._inputs(text, images)
            found = [x[0].float() for x in qwen3_vl.outputs(b, self.model.language, b["tokens"].shape[1])]
            return torch.stack(found).cpu().numpy()

    def generate(self, text: str, images: Sequence[np.ndarray] = (), max_tokens: int = 128) -> str:
        """The answer to one user turn, greedily decoded."""
        return self.tokenizer.decode(self.answer(text, images, max_tokens))

    def answer(self, text: str, images: Sequence[np.ndarray] = (), max_tokens: int = 128) -> list[int]:
        """Ids of the answer, without the one that ends it; K/V stay in one static cache."""
        if max_tokens < 1:
            raise ObservationError(f"max_tokens is {max_tokens}; ask for at least one")
        with torch.no_grad(), use_kernels(self.placement.kernels):
            b = self._inputs(text, images)
            decoder = Decoder(self.model, b, max_tokens)
            ids: list[int] = []
            while len(ids) < max_tokens:
                token = int(decoder.token)
                if token in self.ends:
                    break
                ids.append(token)
                if len(ids) < max_tokens:
                    decoder.step()
            return ids

    def _inputs(self, text: str, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Buffers of one turn, as long as the turn, with the vision stages run."""
        vision, device = self.model.vision, self.placement.device
        if images and vision is None:
            raise ObservationError("this checkpoint is a language model without vision: leave the images out")
        grids = [self.rules.grid(*image.shape[:2]) for image in images]
        counts = [h * w // self.rules.merge**2 for h, w in grids]
        patches = max((h * w for h, w in grids), default=0)
        slots = Slots(len(images), patches, len(self.tokenizer.turn(counts, text)))
        encoded = Encoder(self.tokenizer, self.rules, slots).encode(images, text)
        if vision is None:
            return self._text_inputs(encoded.inputs)
        sizes = qwen3_vl.Qwen3VLSizes(vision.sizes, self.model.language.sizes)
        b = _allocate(qwen3_vl.buffers(sizes, slots, 1, self.placement.dtype), device)
        for name, value in encoded.inputs.items():
            _write(b[name][0], value)
        qwen3_vl.layout_stage(sizes.language, slots, sizes.vision.merge).run(b)
        if images:
            qwen3_vl.grid_stage(vision, slots).run(b)
            qwen3_vl.resize_stage(vision.sizes, slots).run(b)
            qwen3_vl.vision_stage(vision).run(b)
        return b

    def _text_inputs(self, inputs: dict[str, Value]) -> dict[str, torch.Tensor]:
        s, device = self.model.language.sizes, self.placement.device
        b = {k: torch.tensor(inputs[k], device=device)[None] for k in ("tokens", "positions", "visual_rows")}
        cos, sin = rotary(b["positions"], s)
        rows = torch.zeros_like(b["tokens"])  # of a table with the one row of zeros
        visual = torch.zeros(1, 1, s.width, dtype=self.placement.dtype, device=device)
        more = {"key_valid": torch.ones_like(b["tokens"]), "rotary_cos": cos, "rotary_sin": sin}
        return b | more | {"feature_rows": rows, "visual": visual}


class Decoder:
    """One answer: prefill, then a token a step with its place as data; on CUDA the step is one captured graph."""

    def __init__(self, model: LevelModel, b: dict[str, torch.Tensor], max_tokens: int) -> None:
        s, tokens = model.language.sizes, b["tokens"]
        self._model, rows = model, tokens.shape[1]
        shape = (s.depth, 1, rows + max_tokens, s.kv_heads, s.head_dim)
        like = model.language.embedding
        self._keys, self._values = like.new_zeros(shape), like.new_zeros(shape)
        self._row = torch.tensor([rows], device=tokens.device)
        self._done = torch.zeros_like(self._row)
        self._rows = torch.arange(rows + max_tokens, device=tokens.device)
        # text goes on after the last image's longer side, not after its number of tokens
        after = b["positions"][:, :, -1:] + 1 + torch.arange(max_tokens, device=tokens.device)
        self._cos, self._sin = rotary(after, s)
        x = qwen3_vl.last(qwen3_vl.outputs(b, model.language, rows, (self._keys, self._values)))
        self.token = model.head(x[:, -1:], like).argmax(-1).int()[0]
        self._next = self.token.clone()
        self._replay = self._captured() if tokens.is_cuda else self._advance

    def step(self) -> None:
        """`token` becomes the one that follows it."""
        self._next.copy_(self.token)
        self._replay()
        self._row += 1
        self._done += 1

    def _advance(self) -> None:
        language = self._model.language
        cos, sin = (angles.index_select(1, self._done) for angles in (self._cos, self._sin))
        seen = (self._rows <= self._row).int()[None]
        reading = Reading(cos, sin, seen, (self._keys, self._values), self._row)
        x = embedding.embed(self._next[None], language.embedding, 1.0)
        self.token.copy_(self._model.head(language(x, reading), language.embedding).argmax(-1)[0])

    def _captured(self) -> Callable[[], None]:
        kept, side = self.token.clone(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up; it writes the row that the first step writes again
            self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self.token.copy_(kept)
        return graph.replay


def load_level(path: str | Path, *, device: str | None = None, precision: str | None = None) -> Level:
    """A Qwen3 or Qwen3-VL directory -> its level. Raises CheckpointError, or PrecisionError, before weights are read."""
    placement = place(device, precision, 1, "fused")
    checkpoint = open_checkpoint(path)
    config, directory = checkpoint.config, checkpoint.path
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen3_vl"):
        raise CheckpointError(f"{directory}: model_type is '{kind}'; the levels are qwen3 and qwen3_vl")
    if checkpoint.tokenizer is None or checkpoint.tokenizer.suffix != ".json":
        raise CheckpointError(f"{directory} has no tokenizer.json: copy it from the published checkpoint")
    tokenizer = ChatTokenizer.open(checkpoint.tokenizer)
    language, vision = _sizes(Fields(directory / "config.json", config))
    with torch.device("meta"):
        model = LevelModel(language, vision).to(placement.dtype)
    model = model.to_empty(device=placement.device).requires_grad_(False)
    table = _names(language, vision)
    account = load_weights(dict(model.named_parameters()), checkpoint.tensors, table)
    rules = ImageRules() if vision is None else image_rules([directory], vision)
    return Level(model, placement, tokenizer, rules, _ends(directory, tokenizer), account)


def _sizes(config: Fields) -> tuple[Qwen3Sizes, Qwen3VisionSizes | None]:
    if config.text("model_type") == "qwen3":
        return qwen3_vl.read_language(config, config.flag("tie_word_embeddings", False)), None
    both = qwen3_vl.read_sizes(config)
    return both.language, both.vision


def _names(language: Qwen3Sizes, vision: Qwen3VisionSizes | None) -> NameTable:
    inner = "model." if vision is None else "model.language_model."
    targets = qwen3_names.language(language, inner, "language.")
    targets |= qwen3_names.head(language, inner, "lm_head.weight", "head.")
    if vision is not None:
        targets |= qwen3_names.vision(vision, "model.visual.", "vision.")
    return NameTable(targets, {}, (), ("lm_head.weight",) if language.tied else ())


def _ends(directory: Path, tokenizer: ChatTokenizer) -> frozenset[int]:
    stated = directory / "generation_config.json"
    settings = Fields.read(stated) if stated.is_file() else Fields(stated, {})
    if isinstance(settings.values.get("eos_token_id"), int):
        return frozenset([settings.count("eos_token_id")])
    return frozenset(settings.counts("eos_token_id", default=tokenizer.ids(END)))


def _allocate(buffers: Sequence[Buffer], device: torch.device) -> dict[str, torch.Tensor]:
    return {b.name: torch.zeros(b.shape, dtype=b.dtype, device=device) for b in buffers}


def _write(window: torch.Tensor, value: Value) -> None:
    if isinstance(value, np.ndarray):
        window.copy_(torch.tensor(value))
        return
    for row, flat in zip(window, value, strict=True):
        row[: flat.size].copy_(torch.tensor(flat))
