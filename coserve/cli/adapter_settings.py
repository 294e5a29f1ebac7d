"""Settings of a PEFT method as commands take them: `--adapter-setting KEY=VALUE`."""

import json
from collections.abc import Sequence
from typing import Any

from coserve.errors import JobError


def adapter_settings(given: Sequence[str] | None) -> dict[str, Any]:
    """By name; values are JSON, or else text. JobError for what is no KEY=VALUE."""
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
