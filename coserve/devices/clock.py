"""Real time."""

import time


class WallClock:
    """Seconds of the monotonic clock, which all processes of a machine share."""

    def now(self) -> float:
        return time.monotonic()
