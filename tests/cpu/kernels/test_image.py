"""Frames to patches against torch's own resize on the host."""

import pytest
import torch
import torch.nn.functional as F
from agreement import agree

from innerloop.kernels.image import frames_to_patches
from innerloop.kernels.image import triton as kernel
from innerloop.kernels.image.reference import Placement

CAPACITY = 90 * 120 * 3
SIZES = [(28, 28), (90, 120), (120, 90), (60, 60), (29, 27), (1, 28), (7, 90), (13, 17), (3, 3)]


def _frames(height: int, width: int, fill: int) -> torch.Tensor:
    """One frame; what lies behind its bytes is `fill`."""
    frames = torch.full((1, 1, CAPACITY), fill, dtype=torch.uint8)
    torch.manual_seed(height * 1000 + width)
    frames[..., : height * width * 3] = torch.randint(0, 256, (height * width * 3,), dtype=torch.uint8)
    return frames


def _by_interpolate(frames: torch.Tensor, height: int, width: int, size: int, placement: Placement) -> torch.Tensor:
    """[3, size, size] in [-1, 1]."""
    image = frames[0, 0, : height * width * 3].view(1, height, width, 3).permute(0, 3, 1, 2).float() / 255
    ratio = max(width / size, height / size)
    rows, columns = int(height / ratio), int(width / ratio)
    image = F.interpolate(image, size=(rows, columns), mode="bilinear", align_corners=False).clamp(0, 1)
    share = {"center": 0.5, "top_left": 0.0, "bottom_right": 1.0}[placement]
    top, left = int((size - rows) * share), int((size - columns) * share)
    padded = torch.zeros(3, size, size)
    padded[:, top : top + rows, left : left + columns] = image[0]
    return padded * 2 - 1


def _unpatched(patches: torch.Tensor, size: int, patch: int) -> torch.Tensor:
    side = size // patch
    return patches.view(side, side, 3, patch, patch).permute(2, 0, 3, 1, 4).reshape(3, size, size)


@pytest.mark.parametrize("placement", ["center", "top_left", "bottom_right"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_against_interpolate(height: int, width: int, placement: Placement) -> None:
    frames, sizes = _frames(height, width, 255), torch.tensor([[[height, width]]], dtype=torch.int32)
    expected = _by_interpolate(frames, height, width, 28, placement)
    for implementation in (frames_to_patches, kernel.frames_to_patches):
        patches = implementation(frames, sizes, 28, 14, torch.float32, placement)
        assert (_unpatched(patches, 28, 14) - expected).abs().max() <= 1e-6
        assert torch.equal(patches, implementation(_frames(height, width, 0), sizes, 28, 14, torch.float32, placement))


def test_cameras_of_different_sizes_and_bf16() -> None:
    frames = torch.cat([_frames(*s, 9) for s in SIZES[:3]], dim=1)
    sizes = torch.tensor([[list(s) for s in SIZES[:3]]], dtype=torch.int32)
    agree("image", "frames_to_patches", frames, sizes, 28, 7, torch.float32)
    exact = kernel.frames_to_patches(frames, sizes, 28, 7, torch.float32)
    assert (kernel.frames_to_patches(frames, sizes, 28, 7, torch.bfloat16) - exact).abs().max() <= 2.0**-7


def test_an_absent_camera_of_one_pixel_is_finite() -> None:
    sizes = torch.ones(1, 1, 2, dtype=torch.int32)
    assert frames_to_patches(_frames(1, 1, 0), sizes, 28, 14, torch.float32).isfinite().all()
    assert kernel.frames_to_patches(_frames(1, 1, 0), sizes, 28, 14, torch.float32).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("patch", "temporal"), [(4, 2), (3, 1), (16, 2)])
def test_planes_of_a_patch(patch: int, temporal: int, dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (2, 5, 3 * patch * patch), dtype=torch.uint8)
    agree("image", "planes", pixels, temporal, dtype)
    found = kernel.planes(pixels, temporal, torch.float32).view(2, 5, 3, temporal, patch, patch)
    expected = pixels.view(2, 5, patch, patch, 3).permute(0, 1, 4, 2, 3) / 127.5 - 1
    for frame in range(temporal):
        assert torch.equal(found[:, :, :, frame], expected)
