"""Cost of resizing frames to patches."""

from innerloop.kernels.cost import Cost


def resample(images: int, old: tuple[int, int], new: tuple[int, int], taps: tuple[int, int]) -> Cost:
    """Sizes as height and width. Columns before rows, each output of a pass once; the frame read and the result written once."""
    (height, width), (tall, wide), (down, across) = old, new, taps
    return Cost(
        images * 3 * 2 * (height * wide * across + tall * wide * down), images * 3 * (height * width + tall * wide)
    )
