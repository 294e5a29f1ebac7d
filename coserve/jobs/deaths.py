"""Which jobs engines die of: they are set aside, and no other job is.

The engine's process leaves word of the jobs that it worked for (`coserve.worker.activity`). If it
was one alone, that is what it died of. Of several, each is suspected, and the next engine works for
suspects one at a time, until it is known which, or until each has come well beyond where it was. So
a job fails after a few deaths of its own, whatever it did between them, and a job that happened to
be there, or that somebody's `kill -9` met, does not.

Counts are in the store, so that no restart of the server hides what a job does to engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Deaths of its own that a job has before it fails.
MAX_DEATHS = 3
# Optimizer steps beyond the furthest of its deaths, after which they are forgotten.
_STEPS_TO_FORGET = 100


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """Engines that died while they worked for one job, which is suspected. num: those that worked
    for no other. step: the furthest that the job had come then.
    """

    num: int
    step: int

    @property
    def are_too_many(self) -> bool:
        """Whether the job is to fail."""
        return self.num >= MAX_DEATHS

    @property
    def alone_until_step(self) -> int:
        """No step of an engine is to work for another job as well until the job has made this step,
        and all is forgotten.
        """
        return self.step + _STEPS_TO_FORGET


def after_death(known: Mapping[str, Deaths], under_way: Mapping[str, int]) -> dict[str, Deaths]:
    """Who is suspected when an engine has died. known: who was before. under_way: the jobs that it
    worked for, and how far each had come.
    """
    is_its_own = len(under_way) == 1
    after = {job: each for job, each in known.items() if each.num > 0 or not is_its_own}
    for job, step in under_way.items():
        before = after.get(job, Deaths(num=0, step=0))
        after[job] = Deaths(num=before.num + is_its_own, step=max(before.step, step))
    return after
