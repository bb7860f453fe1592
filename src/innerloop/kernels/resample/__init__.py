"""uint8 frames of any size to uint8 patches, by chains of separable resizes whose weights are data."""

from torch import Tensor

from innerloop.kernels.resample import reference
from innerloop.kernels.resample.words import HEAD, Word, room
from innerloop.kernels.select import by_device

__all__ = ["HEAD", "Word", "resample", "room"]


def resample(frames: Tensor, resizes: Tensor, steps: int, patches: int, patch: int, merge: int) -> Tensor:
    """frames uint8 [R, capacity] (HWC RGB), resizes int32 [R, words] (see `Word`) -> uint8 [R, patches, 3 patch^2],
    patches in merge order, each row, column, channel; zero behind the last one.

    Whole numbers, or float32 in a fixed order: one result on every device.
    """
    return by_device(reference.resample, frames)(frames, resizes, steps, patches, patch, merge)
