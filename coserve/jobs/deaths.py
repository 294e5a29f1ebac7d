"""Which jobs engines die of: they are set aside, and no other job is.

The engine's process leaves word of the jobs that it worked for (`coserve.worker.activity`). If it was one alone, that
is what it died of. Of several, each is suspected, and the next engine works for suspects one at a time, until it is
known which, or until each has come well beyond where it was. So a job fails after a few deaths of its own, whatever it
did between them, and a job that happened to be there, or that somebody's `kill -9` met, does not.

Counts are this process's: a restart of the server begins anew.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Deaths of its own that a job has before it fails.
MOST_DEATHS = 3
# Optimizer steps beyond the furthest of its deaths, after which they are forgotten.
_STEPS_TO_FORGET = 100


@dataclass
class Deaths:
    """Engines that died while they worked for one job. num: those that worked for no other. step: the furthest that it
    had come then. is_suspect: whether the next engine is to work for it alone.
    """

    num: int = 0
    step: int = 0
    is_suspect: bool = False

    @property
    def alone_until_step(self) -> int:
        """Until then, no step of an engine is to work for another job as well; 0: not at all."""
        return self.step + _STEPS_TO_FORGET if self.is_suspect else 0

    def note_step(self, step: int) -> None:
        """The job has made this step."""
        if (self.num or self.is_suspect) and step >= self.step + _STEPS_TO_FORGET:
            self.num, self.step, self.is_suspect = 0, 0, False

    def note_death(self, step: int, *, is_its_own: bool) -> None:
        """An engine has died; step: how far the job had come."""
        self.num += is_its_own
        self.step, self.is_suspect = max(self.step, step), True


def note_death(under_way: Collection[tuple[Deaths, int]], everybody: Iterable[Deaths]) -> None:
    """An engine has died. under_way: of the jobs that it worked for, and how far each had come."""
    is_known = len(under_way) == 1
    if is_known:
        for each in everybody:
            each.is_suspect = each.num > 0
    for deaths, step in under_way:
        deaths.note_death(step, is_its_own=is_known)
