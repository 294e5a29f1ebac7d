"""Profiles on disk: one file for each device, model, dtype and state of the code."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from coserve.home import is_trusted, make_private
from coserve.scheduling.profile import Profile

_log = logging.getLogger(__name__)


def read_profile(path: Path) -> Profile | None:
    """Return the profile in a file; None if there is none, or it must be measured again.

    That is so if anything is wrong with it, or another user can have written it.
    """
    try:
        if not is_trusted(path):
            _log.warning(
                "another user can write %s, so it is not used: the device is measured again", path
            )
            return None
        return Profile.from_json(json.loads(path.read_text())["profile"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_identity(path: Path) -> dict[str, Any] | None:
    """Return what the profile in a file was measured for; None if that cannot be read."""
    try:
        of = json.loads(path.read_text())["of"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return of if isinstance(of, dict) else None


def write_profile(path: Path, of: dict[str, Any], profile: Profile) -> None:
    """Write a profile to a file, whole or not at all.

    Args:
        path: The file.
        of: What the profile was measured for.
        profile: The profile.
    """
    try:
        make_private(path.parent)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"of": of, "profile": profile.to_json()}, indent=1))
        part.chmod(0o600)
        part.replace(path)
    except OSError as error:
        _log.warning("the profile could not be kept in %s: %s", path.parent, error)


def correct_profile(path: Path, profile: Profile) -> None:
    """Replace a measured profile by one that follows from what steps really took."""
    if (of := read_identity(path)) is None:
        return
    _log.info("steps have long taken something else than the profile says: %s is corrected", path)
    write_profile(path, of, profile)
