"""Hidden states regressed to actions: layer norms, products and ReLUs with residuals (moojink/openvla-oft, starVLA)."""

import torch
from torch import nn

from innerloop.blocks.stack import Stack
from innerloop.kernels import linear, norm

EPS = 1e-5  # torch.nn.LayerNorm's default
BLOCKS = 2


class Residual(nn.Module):
    """Layer norm, product, ReLU, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_weight, self.norm_bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.weight, self.bias = _affine(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, width] -> [B, T, width]."""
        normed = norm.layer_norm(x, self.norm_weight, self.norm_bias, EPS)
        return x + linear.linear(normed, self.weight, self.bias, activation="relu")


class RegressionHead(nn.Module):
    """Hidden states of the placeholder tokens to actions ."""

    def __init__(self, width: int, dims: int) -> None:
        super().__init__()
        self.norm_in_weight, self.norm_in_bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.in_weight, self.in_bias = _affine(2 * width, width)
        self.blocks = Stack([Residual(2 * width) for _ in range(BLOCKS)])
        wide = 2 * width
        self.norm_out_weight, self.norm_out_bias = nn.Parameter(torch.empty(wide)), nn.Parameter(torch.empty(wide))
        self.out_weight, self.out_bias = _affine(dims, wide)

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
    return {f"{ours}{our}{k}": (f"{theirs}{their}{k}",) for our, their in pairs.items() for k in ("weight", "bias")}


def _affine(rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(rows))
