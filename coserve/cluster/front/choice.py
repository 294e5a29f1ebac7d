"""Which of several fronts a request goes to. Ray Serve's HTTP servers import this: without what a
front runs.
"""

from collections.abc import Mapping
from typing import Any

# In what a front says of itself to those who choose one.
ANSWERS = "answers"


def choose_front(said: Mapping[Any, Mapping[str, Any]]) -> list[Any]:
    """Of fronts, by what each last said of itself, those that a request may go to: the one that
    answers; none while nobody does. One that is alone and has said nothing yet has no others to
    wait for.
    """
    is_alone = len(said) == 1
    return [front for front, stats in said.items() if stats.get(ANSWERS, is_alone)]
