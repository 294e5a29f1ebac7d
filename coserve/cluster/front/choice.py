"""Choice among several fronts. Ray Serve's HTTP servers import this, without what a front runs."""

from collections.abc import Mapping
from typing import Any

# Key of the routing stats: whether this front answers.
ANSWERS = "answers"


def choose_front(stats_by_front: Mapping[Any, Mapping[str, Any]]) -> list[Any]:
    """Return the fronts that a request may go to: the one that answers; none while nobody does.

    Args:
        said: The newest routing stats of each front. A front that is alone and has reported none
            yet has no others to wait for.
    """
    is_alone = len(stats_by_front) == 1
    return [front for front, stats in stats_by_front.items() if stats.get(ANSWERS, is_alone)]
