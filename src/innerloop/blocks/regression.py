"""Hidden states regressed to actions: layer norms, products and ReLUs with residuals (moojink/openvla-oft, starVLA).

One placeholder token an action; nothing is sampled.
"""

import torch
from torch import nn

from innerloop.blocks import affine as affines
from innerloop.blocks import qwen3_vl
from innerloop.blocks.affine import affine
from innerloop.blocks.qwen3 import Qwen3
from innerloop.blocks.qwen3_vl import LANGUAGE_READS, Tensors
from innerloop.blocks.stack import Stack
from innerloop.contract import Buffer, Role, Stage
from innerloop.kernels import linear, norm

EPS = 1e-5  # torch.nn.LayerNorm's default
BLOCKS = 2
TICKS = {"query_rows": "prompt"}


class Residual(nn.Module):
    """Layer norm, product, ReLU, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_weight, self.norm_bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.weight, self.bias = affine(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, width] -> [B, T, width]."""
        normed = norm.layer_norm(x, self.norm_weight, self.norm_bias, EPS)
        return x + linear.linear(normed, self.weight, self.bias, activation="relu")


class RegressionHead(nn.Module):
    """Hidden states of the placeholder tokens to actions."""

    def __init__(self, width: int, dims: int) -> None:
        super().__init__()
        self.norm_in_weight, self.norm_in_bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.in_weight, self.in_bias = affine(2 * width, width)
        self.blocks = Stack([Residual(2 * width) for _ in range(BLOCKS)])
        wide = 2 * width
        self.norm_out_weight, self.norm_out_bias = nn.Parameter(torch.empty(wide)), nn.Parameter(torch.empty(wide))
        self.out_weight, self.out_bias = affine(dims, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, chunk, width] -> [B, chunk, dims]."""
        normed = norm.layer_norm(x, self.norm_in_weight, self.norm_in_bias, EPS)
        x = linear.linear(normed, self.in_weight, self.in_bias, activation="relu")
        for block in self.blocks:
            x = block(x)
        return linear.linear(
            norm.layer_norm(x, self.norm_out_weight, self.norm_out_bias, EPS), self.out_weight, self.out_bias
        )


def names(theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """Our parameter names -> those of MLPResNet: `theirs` ends before `layer_norm1`."""
    pairs = {"norm_in_": "layer_norm1.", "in_": "fc1.", "norm_out_": "layer_norm2.", "out_": "fc2."}
    for i in range(BLOCKS):
        pairs |= {f"blocks.{i}.norm_": f"mlp_resnet_blocks.{i}.ffn.0.", f"blocks.{i}.": f"mlp_resnet_blocks.{i}.ffn.1."}
    return affines.names(pairs, theirs, ours)


def buffers(chunk: int, width: int, batch: int, dtype: torch.dtype) -> list[Buffer]:
    """Rows of the placeholder tokens in the sequence, and their hidden states."""
    return [
        Buffer("query_rows", (batch, chunk), torch.int32, Role.INPUT),
        Buffer("queries", (batch, chunk, width), dtype, Role.STATE),
    ]


def context_stage(language: Qwen3, capacity: int) -> Stage:
    """Tokens and visual tokens -> the last layer's output at the placeholder tokens."""

    def run(b: Tensors) -> None:
        hidden = qwen3_vl.last(qwen3_vl.outputs(b, language, capacity))
        rows = b["query_rows"].long()[..., None].expand(-1, -1, hidden.shape[-1])
        b["queries"].copy_(hidden.gather(1, rows))

    return Stage("context", run, (*LANGUAGE_READS, "query_rows"), ("queries",))


def action_stage(head: RegressionHead) -> Stage:
    """Hidden states of the placeholder tokens -> actions."""

    def run(b: Tensors) -> None:
        b["actions"].copy_(head(b["queries"]))

    return Stage("action", run, ("queries",), ("actions",))
