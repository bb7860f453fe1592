"""Cost of frame resizing and patching, and of a patch's planes."""

from innerloop.kernels.cost import Cost


def frames_to_patches(cameras: int, height: int, width: int, size: int, element: int = 2) -> Cost:
    """Reads at most four taps an output pixel and at most the frame; writes the padded square."""
    resized = size * size * min(height, width) // max(height, width)
    read = 3 * min(height * width, 4 * resized)
    return Cost(cameras * 3 * resized * 12, cameras * (read + 3 * size * size * element))


def planes(patches: int, pixels: int, temporal: int, element: int = 2) -> Cost:
    """pixels: of all channels. Each is scaled and written `temporal` times."""
    return Cost(2 * patches * pixels * temporal, patches * pixels * (1 + temporal * element))
