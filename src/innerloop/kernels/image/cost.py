"""Cost of frame resizing and patching."""

from innerloop.kernels.cost import Cost


def frames_to_patches(cameras: int, height: int, width: int, size: int, element: int = 2) -> Cost:
    """Reads at most four taps an output pixel and at most the frame; writes the padded square."""
    resized = size * size * min(height, width) // max(height, width)
    read = 3 * min(height * width, 4 * resized)
    return Cost(cameras * 3 * resized * 12, cameras * (read + 3 * size * size * element))
