"""Learned time of steps outside their sections: the host's part, before a device begins and after
it is done.
"""

# Weight of the newest step, and how far the first counts.
_WEIGHT, _FIRST_WEIGHT = 0.1, 0.5
# By how much a step may take more than believed, as a factor and in seconds: one that was held up
# must not count far.
_MAX_ERROR, _MAX_MORE_S = 2.0, 1e-4
# Of a first step.
_MAX_FIRST_S = 5e-3


class StepOverhead:
    """Seconds of steps in which packs begin, and of others. No clock, no I/O."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}

    def seconds(self, *, begins: bool) -> float:
        """Return the overhead of a step in which packs begin, or of another; before one was seen,
        the other steps'.
        """
        return self._seconds.get(begins, self._seconds.get(False, 0.0))

    def observe(self, seconds: float, *, begins: bool) -> None:
        """Learn from the overhead of a step."""
        believed, seconds = self.seconds(begins=begins), max(0.0, seconds)
        is_first = begins not in self._seconds
        most_s = _MAX_FIRST_S if is_first else _MAX_ERROR * believed + _MAX_MORE_S
        weight = _FIRST_WEIGHT if is_first else _WEIGHT
        self._seconds[begins] = believed + weight * (min(seconds, most_s) - believed)
