"""What of a test takes more than a newcomer waits for."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def long_but(*short: Any, of: Iterable[Any]) -> list[Any]:
    """Values of a parameter: `make test` runs those that are short, `make test-long` the others."""
    return [each if each in short else pytest.param(each, marks=pytest.mark.long) for each in of]


# Kills of ranks in each test of them; COSERVE_RANK_KILLS=50 tries more.
NUM_RANK_KILLS = int(os.environ.get("COSERVE_RANK_KILLS", "10"))
