"""The vision tower of Qwen3-VL: any grid of patches up to a capacity, 2-D rotary positions, merger and DeepStack."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from innerloop.blocks.affine import affine
from innerloop.blocks.siglip import EPS, Shares, SiglipLayer, encoded
from innerloop.blocks.sizes import VisionSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import attention, image, linear, norm

ROPE_THETA = 10000.0  # transformers Qwen3VLVisionRotaryEmbedding


@dataclass(frozen=True)
class Qwen3VisionSizes(VisionSizes):
    """vision_config; image_size / patch_size is the side of the learned position table."""

    out: int = 0  # width of the language model
    merge: int = 2
    temporal: int = 2  # frames a patch; an image is repeated
    deepstack: tuple[int, ...] = ()  # the layers after which features branch off

    @property
    def side(self) -> int:
        """Rows and columns of the position table."""
        return self.image_size // self.patch_size

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch as the host sends it: row, column, channel."""
        return 3 * self.patch_size**2


class Qwen3VisionLayer(SiglipLayer):
    """SigLIP's layer with rotary positions."""

    def attend_rotated(self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, valid: torch.Tensor) -> Shares:
        """normed [I, P, D], cos and sin [I, P, hd / 2], valid int32 [I, P] -> shares of [I, P, D]."""
        qkv, scale = linear.linear(normed, self.qkv_weight, self.qkv_bias), (normed.shape[2] // self.heads) ** -0.5
        mixed = attention.rotary_attention(qkv, cos, sin, self.heads, valid, scale)
        return linear.deferred(mixed, self.out_weight, self.out_bias)


class Mergers(nn.Module):
    """merge^2 neighbouring patches -> one token of the language model's width, of the last and each DeepStack layer.

    The last layer's norm is over a patch, the others' are over what is merged. Their products are of one size, stacked,
    and made together when the last layer is done: each alone has too few rows to be worth its kernels.
    """

    def __init__(self, sizes: Qwen3VisionSizes) -> None:
        super().__init__()
        d, features = sizes.hidden_size * sizes.merge**2, len(sizes.deepstack)
        self.norm_weight, self.norm_bias = (nn.Parameter(torch.empty(sizes.hidden_size)) for _ in range(2))
        if features:
            self.feature_norm_weight, self.feature_norm_bias = (
                nn.Parameter(torch.empty(features * d)) for _ in range(2)
            )
        self.up_weight, self.up_bias = affine((1 + features) * d, d)
        self.down_weight, self.down_bias = affine((1 + features) * sizes.out, d)

    def forward(self, normed: torch.Tensor, features: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """normed [I, P, D] of the last layer and [I, P, D] of each DeepStack layer in turn, in merge order -> `out`
        [1 + features, I * P / merge^2, out].
        """
        wide = self.up_weight.shape[1]
        merged = normed.reshape(1, -1, wide)
        if features:
            weight, bias = self.feature_norm_weight.view(-1, wide), self.feature_norm_bias.view(-1, wide)
            merged = norm.layer_norms([x.reshape(-1, wide) for x in (normed, *features)], weight, bias, EPS, plain=1)
        hidden = linear.batched(merged, self.up_weight, self.up_bias, activation="gelu")
        linear.batched(hidden, self.down_weight, self.down_bias, out)


@dataclass(frozen=True)
class Grid:
    """What follows from the images' sizes alone: valid int32 [I, P]; cos, sin float32 [I, P, hd / 2]; position [I, P, D]."""

    valid: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor


class Qwen3Vision(nn.Module):
    """Patches of several images -> tokens; each image attends to itself, images are the batch of every layer."""

    def __init__(self, sizes: Qwen3VisionSizes) -> None:
        super().__init__()
        d = sizes.hidden_size
        self.sizes = sizes
        self.patch_weight = nn.Parameter(torch.empty(d, sizes.temporal * sizes.patch_bytes))
        self.patch_bias = nn.Parameter(torch.empty(d))
        self.position = nn.Parameter(torch.empty(sizes.tokens, d))
        self.layers = Stack([Qwen3VisionLayer(sizes) for _ in range(sizes.layers)])
        self.mergers = Mergers(sizes)

    def grid(self, grids: torch.Tensor, patches: int) -> Grid:
        """grids int32 [I, 2] (rows and columns of patches), for `patches` rows an image."""
        row, column, valid = self._places(grids, patches)
        s = self.sizes
        quarter = torch.arange(0, s.head_dim // 2, 2, dtype=torch.float32, device=grids.device)
        frequency = 1.0 / ROPE_THETA ** (quarter / (s.head_dim // 2))
        angles = torch.cat([row.float()[..., None] * frequency, column.float()[..., None] * frequency], dim=-1)
        return Grid(valid.int(), angles.cos(), angles.sin(), self._interpolate(grids, row, column))

    def _places(self, grids: torch.Tensor, patches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row and column of each patch, int64 [I, P]; patches come block after block of merge x merge."""
        merge = self.sizes.merge
        index = torch.arange(patches, device=grids.device)[None]
        block, inner = index // merge**2, index % merge**2
        across = torch.clamp(grids[:, 1:] // merge, min=1)
        valid = index < grids[:, :1] * grids[:, 1:]
        row = (block // across) * merge + inner // merge
        column = (block % across) * merge + inner % merge
        return torch.where(valid, row, 0), torch.where(valid, column, 0), valid

    def _interpolate(self, grids: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """[I, P, D]: the position table, bilinear between its corners."""
        last = self.sizes.side - 1
        low, high, share = zip(
            *(_between(place, grids[:, axis : axis + 1], last) for axis, place in ((0, row), (1, column))), strict=True
        )
        total = torch.zeros((), device=grids.device)
        for down, y in ((1.0 - share[0], low[0]), (share[0], high[0])):
            for right, x in ((1.0 - share[1], low[1]), (share[1], high[1])):
                corner = self.position[y * self.sizes.side + x]
                total = total + corner * (down * right)[..., None].to(corner.dtype)
        return total.to(self.position.dtype)

    def forward(self, pixels: torch.Tensor, grid: Grid, out: torch.Tensor) -> None:
        """pixels uint8 [I, P, 3 p^2] -> `out` [1 + DeepStack layers, I * P / merge^2, width]: tokens, then DeepStack's."""
        planes = image.planes(pixels, self.sizes.temporal, self.patch_weight.dtype)
        delta, left = linear.deferred(planes, self.patch_weight, self.patch_bias)
        first = self.layers[0]
        x, normed = norm.add_layer_norm(grid.position, delta, first.norm1_weight, first.norm1_bias, EPS, left)

        def attend(layer: Qwen3VisionLayer, y: torch.Tensor) -> Shares:
            return layer.attend_rotated(y, grid.cos, grid.sin, grid.valid)

        after = (self.mergers.norm_weight, self.mergers.norm_bias)
        _, normed, features = encoded(self.layers, x, normed, EPS, attend, after, self.sizes.deepstack)
        self.mergers(normed, features, out)


def _between(place: torch.Tensor, count: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Neighbours and share of the upper one where `count` points are spread evenly over 0..last, in torch.linspace's bits."""
    step = last / torch.clamp(count - 1, min=1).float()
    exact = torch.where(place < count // 2, place.float() * step, last - (count - 1 - place).float() * step)
    exact = torch.clamp(exact, 0.0, float(last))
    low = exact.long()
    return low, torch.clamp(low + 1, max=last), exact - low.float()
