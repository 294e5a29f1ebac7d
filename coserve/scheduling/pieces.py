"""Sizes of pieces of work in rows: the largest that fit, and the smallest that are worth
running.
"""

from collections.abc import Callable

# The smallest piece of a prompt that is urgent, where fewer rows cost more, each, than
# MAX_ROW_COST times as much.
MIN_PREFILL_ROWS, MAX_ROW_COST = 64, 1.1
# By which factor half of a piece must be the cheaper one per row to be taken in its place. Else a
# size that was slow when first seen, as where memory is touched for the first time, would not be
# tried again for long.
CLEARLY = 1.05
# Where no request decodes, a prompt may take this many times the time of a step if it ends with it:
# its last few rows would take as long as a token of all, and an arrival waits for them in either
# case.
WHOLE_STRETCH = 1.25
# Kernels compute rows in tiles of as many; as few fill up one that others have begun.
TILE_ROWS, MIN_FILLING_ROWS = 16, 4


def largest_that_fits(
    least: int, most: int, seconds: Callable[[int], float], within_s: float
) -> int:
    """Return the largest number from `least` to `most` that fits, to within a sixty-fourth; `least`
    if none does.

    Seconds are nearly linear in the number, so the search interpolates and halves in turns.
    """
    if (high_s := seconds(most)) <= within_s:
        return most
    low, high = least, most
    low_s, on_line = seconds(least), True
    while low_s < within_s and high - low > max(1, low // 64):
        if on_line:
            middle = low + max(
                1, min(int((high - low) * (within_s - low_s) / (high_s - low_s)), high - low - 1)
            )
        else:
            middle = (low + high) // 2
        middle_s, on_line = seconds(middle), not on_line
        if middle_s <= within_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return low


def rows_of_tile(others: int) -> int:
    """Return the smallest piece of a prompt that has time: it fills a tile with as many other
    rows.
    """
    rows = TILE_ROWS - others % TILE_ROWS
    return rows if rows >= MIN_FILLING_ROWS else rows + TILE_ROWS


def least_urgent(seconds: Callable[[int], float], longest: int, others: int) -> int:
    """Return the smallest piece of an urgent prompt, of at most `longest` rows: one that fills a
    tile with the other rows of the step, if each takes little more time than those of the usual
    piece.

    Args:
        seconds: Time of the step by the rows of the piece.
        others: Other rows of the step.
    """
    usual = min(longest, MIN_PREFILL_ROWS)
    most_s = MAX_ROW_COST * seconds(usual) / usual
    for rows in range(rows_of_tile(others), usual, TILE_ROWS):
        if seconds(rows) <= most_s * rows:
            return rows
    return usual
