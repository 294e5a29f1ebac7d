"""Settings of a PEFT method as commands take them: `--adapter-setting KEY=VALUE`."""

import json
from collections.abc import Sequence
from typing import Any

from coserve.errors import JobError


def adapter_settings(given: Sequence[str] | None) -> dict[str, Any]:
    """Return settings by name; a value is JSON, or else text.

    Raises:
        JobError: A setting is not KEY=VALUE.
    """
    found: dict[str, Any] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise JobError(f"--adapter-setting {each!r} must be KEY=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
