"""The clock of simulations."""


class VirtualClock:
    """A clock that moves only when it is advanced."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds
