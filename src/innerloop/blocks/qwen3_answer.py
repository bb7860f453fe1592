"""Text from a Qwen3-VL plan: a whole answer decoded greedily in one stage, its length fixed.

A graph cannot stop early: `answer` tokens are always decoded, and the host cuts at the first that ends the turn.
"""

import torch

from innerloop.blocks import qwen3_vl
from innerloop.blocks.qwen3 import Qwen3, Qwen3Head, Qwen3Sizes, Reading, rotary
from innerloop.blocks.qwen3_vl import LANGUAGE_READS, Tensors
from innerloop.contract import Buffer, Role, Stage
from innerloop.kernels import embedding
from innerloop.process.qwen3vl import Slots


def buffers(s: Qwen3Sizes, slots: Slots, answer: int, batch: int, dtype: torch.dtype) -> list[Buffer]:
    """K/V of the prompt, room to append an answer, and the answer's ids."""
    rows = slots.tokens
    kept = (s.depth, batch, rows, s.kv_heads, s.head_dim)
    room = (s.depth, batch, rows + answer, s.kv_heads, s.head_dim)
    return [
        *(Buffer(name, kept, dtype, Role.STATE) for name in ("keys", "values")),
        Buffer("first_token", (batch, 1), torch.int32, Role.STATE),
        *(Buffer(name, room, dtype, Role.SCRATCH) for name in ("answer_keys", "answer_values")),
        Buffer("actions", (batch, answer), torch.int32, Role.OUTPUT),
    ]


def context_stage(language: Qwen3, head: Qwen3Head, capacity: int) -> Stage:
    """Prompt -> K/V of every layer, and the answer's first token."""

    def run(b: Tensors) -> None:
        cache = (b["keys"], b["values"])
        hidden = qwen3_vl.last(qwen3_vl.outputs(b, language, capacity, cache))
        last = (b["prompt_length"].long() - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        logits = head(hidden.gather(1, last), language.embedding)
        b["first_token"].copy_(logits.argmax(-1))

    return Stage("context", run, (*LANGUAGE_READS, "prompt_length"), ("keys", "values", "first_token"))


def answer_stage(language: Qwen3, head: Qwen3Head, slots: Slots, answer: int) -> Stage:
    """First token -> the answer's ids. Its K/V stand after all room for the prompt, whatever the prompt's length."""
    rows = slots.tokens

    def run(b: Tensors) -> None:
        for kept, room in (("keys", "answer_keys"), ("values", "answer_values")):
            b[room][:, :, :rows].copy_(b[kept])
        place = (b["prompt_length"].long() - 1)[:, None].expand(-1, 3, -1)
        ahead = torch.arange(1, answer + 1, device=place.device)
        cos, sin = rotary(b["positions"].gather(2, place) + ahead, language.sizes)
        valid = torch.cat([b["key_valid"], torch.zeros_like(b["actions"])], dim=1)
        token = b["first_token"]
        b["actions"][:, :1].copy_(token)
        for step in range(answer - 1):
            at = slice(step, step + 1)
            valid[:, rows + step].fill_(1)
            seen = valid[:, : rows + step + 1].contiguous()
            angles = cos[:, at].contiguous(), sin[:, at].contiguous()
            reading = Reading(*angles, seen, (b["answer_keys"], b["answer_values"]), rows + step)
            hidden = language(embedding.embed(token, language.embedding, 1.0), reading)
            token = head(hidden, language.embedding).argmax(-1).int()
            b["actions"][:, step + 1 : step + 2].copy_(token)

    reads = ("first_token", "keys", "values", "key_valid", "positions", "prompt_length")
    return Stage("action", run, reads, ("actions", "answer_keys", "answer_values"))
