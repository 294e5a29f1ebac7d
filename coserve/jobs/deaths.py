"""Blame for engine deaths: a job that kills engines is isolated and fails, and no other job does.

The engine's process records the jobs that it works for (`coserve.worker.activity`). If it died
while it worked for one job alone, that job caused the death. Of several, each is a suspect, and the
next engine works for suspects one at a time until the cause is known, or until each has made many
steps beyond the one at which it was suspected. So a job fails after a few deaths of its own,
whatever it did between them; a job that only happened to be there, or that a `kill -9` hit, does
not.

Counts are in the store, so that a restart of the server does not reset them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Number of deaths of its own with which a job fails.
MAX_DEATHS = 3
# Optimizer steps beyond the last death after which a job's deaths are forgotten.
_STEPS_TO_FORGET = 100


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """Engine deaths of which one job is suspected."""

    num: int
    """Number of engines that died while they worked for this job alone."""
    step: int
    """Highest optimizer step of the job at any of these deaths."""

    @property
    def are_too_many(self) -> bool:
        """Return whether the job is to fail."""
        return self.num >= MAX_DEATHS

    @property
    def alone_until_step(self) -> int:
        """Step up to which no engine step may serve another job as well; after it all deaths are
        forgotten.
        """
        return self.step + _STEPS_TO_FORGET


def after_death(known: Mapping[str, Deaths], under_way: Mapping[str, int]) -> dict[str, Deaths]:
    """Return the suspected jobs after an engine has died.

    Args:
        known: Jobs that were suspected before.
        under_way: Jobs that the engine worked for, with the optimizer step of each.
    """
    is_its_own = len(under_way) == 1
    # A cause that is known clears those that were only suspected.
    after = {job: each for job, each in known.items() if each.num > 0 or not is_its_own}
    for job, step in under_way.items():
        before = after.get(job, Deaths(num=0, step=0))
        after[job] = Deaths(num=before.num + is_its_own, step=max(before.step, step))
    return after
