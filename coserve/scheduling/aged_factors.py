"""Correction factors of predictions by kind; measured steps move them, and with age they give way
to wider kinds' factors.
"""

from collections.abc import Hashable, Sequence

# Weight of the newest step in a factor.
_WEIGHT = 0.15
# How much of a factor is left after a step in which nothing of its kind was seen: half of it after
# 350.
_TRUST_PER_STEP = 0.998
# One step that was held up by something else must not move a factor far.
_MAX_ERROR = 2.0


def size_class(number: int) -> int:
    """Return the order of magnitude of a number of rows or parameters: 17 to 32 rows are alike,
    since kernels compute them in as many tiles.
    """
    return (number - 1).bit_length()


class AgedFactors:
    """Factors by key; a key that was never seen has the wider factor given with the question. No
    clock, no I/O.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        # grows with all that gives `of` other answers: factors that move, and steps that age them
        self.num_changes = 0
        self._ages = False  # whether an answer since the last step gave way with age
        self._seen: dict[Hashable, tuple[float, int]] = {}  # the factor, and when it was seen

    def of(self, key: Hashable, wider: float) -> float:
        """Return the factor of a key. The longer it was not seen, the more it gives way to the
        wider one: a kind of step that once took very long would never be tried again otherwise.
        """
        seen = self._seen.get(key)
        if seen is None:
            return wider
        factor, step = seen
        if factor == wider:
            return factor
        self._ages = True
        trust = _TRUST_PER_STEP ** (self.num_steps - step)
        aged: float = wider * (factor / wider) ** trust
        return aged

    def move(
        self, key: Hashable, right: float, *, believed: float = 1.0, first_weight: float = _WEIGHT
    ) -> None:
        """Move a factor towards the one that would have predicted a step rightly.

        Args:
            right: The factor that would have been right.
            believed: The factor assumed so far, if this is the first step of its kind.
            first_weight: Weight of the first step of its kind.
        """
        seen = self._seen.get(key)
        old, weight = (believed, first_weight) if seen is None else (seen[0], _WEIGHT)
        factor = old if right == old else old * (right / old) ** weight
        self.num_changes += seen is None or factor != old or self._ages
        self._seen[key] = factor, self.num_steps

    def hold(self, keys: Sequence[Hashable], factor: float) -> bool:
        """Confirm several keys at once if all of them have this factor, as where steps take what
        was predicted. Returns whether they do.
        """
        seen, now = self._seen, (factor, self.num_steps)
        for key in keys:
            if self._ages or key not in seen or seen[key][0] != factor:
                return False
        for key in keys:
            seen[key] = now
        return True

    def count_step(self) -> None:
        """Let every factor age by one step."""
        self.num_steps += 1
        self.num_changes += self._ages
        self._ages = False

    def refresh(self) -> None:
        """Take every factor as seen just now."""
        self._seen = {key: (factor, self.num_steps) for key, (factor, _) in self._seen.items()}
        self.num_changes += 1


def bounded(error: float) -> float:
    """Return measured over predicted, limited to what one step may move a factor."""
    return min(_MAX_ERROR, max(1 / _MAX_ERROR, error))
