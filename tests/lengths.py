"""What of a test takes more than a newcomer waits for."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(*short: Any, of: Iterable[Any]) -> list[Any]:
    """Values of a parameter: `make test` runs those that are short, `make test-long` the others."""
    return [each if each in short else pytest.param(each, marks=pytest.mark.long) for each in of]
