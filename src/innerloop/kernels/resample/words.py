"""Where a step's numbers stand in the words that describe how a frame is brought to size.

A row holds `steps` heads of HEAD words, then tables. A table: where each output pixel begins, then its weights, tap by
tap; weights are whole numbers, or the bits of float32. A head of zeros is a step that does nothing.
"""

from enum import IntEnum


class Word(IntEnum):
    """A step's head. An axis: sum of weight * pixel, plus `round`, shifted right by `shift`, cut to 0 and a limit."""

    HEIGHT = 0  # of the source
    WIDTH = 1
    OUT_HEIGHT = 2
    OUT_WIDTH = 3
    CHAINED = 4  # the source is what the step before gave, not the frame
    FLOATING = 5  # weights and sums are float32, rounded once at the end
    TAPS_X = 6
    TAPS_Y = 7
    TABLE_X = 8  # first word of the table
    TABLE_Y = 9
    ROUND_X = 10
    SHIFT_X = 11
    LIMIT_X = 12
    TERM = 13  # shift of each product of the vertical sum
    ROUND_Y = 14
    SHIFT_Y = 15
    SCALE = 16  # bits of a float32 that the sum is multiplied by, in place of the shift; 0 without


HEAD = len(Word)


def room(patches: int, patch: int) -> tuple[int, int]:
    """Words a frame, and bytes of a picture between two steps, where the result has up to so many patches.

    1920x1080 to 256x256 takes 13,000 words; a result that is there already takes two for each row and column.
    """
    return (1 << 15) + 2 * patches * patch, (1 << 19) + 2 * patches * 3 * patch * patch
