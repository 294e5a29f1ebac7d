"""Profiles of models on this device: measured at the first start, and kept on disk by what they
depend on.

Where several ranks hold the model they measure together, rank 0 reads and writes the file, and all
have its numbers.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coserve.devices.profiles.profiling import measure_profile, quick_profile
from coserve.devices.profiles.store import read_identity, read_profile, write_profile
from coserve.home import cache_directory
from coserve.kernels.groups.base import RankGroup
from coserve.models.backbone import Backbone
from coserve.scheduling.profile import Profile
from coserve.version import VERSION

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

# Packages whose code takes the time.
_MEASURED = ("kernels", "graph", "models", "memory", "tuning", "devices")
_PACKAGE = Path(__file__).parents[2]


def load_profile(
    backbone: Backbone,
    directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Return the profile of a model on this device: from disk, or measured now and kept there.

    Args:
        backbone: The model.
        directory: Where profiles are kept (default: `profiles` in the cache of this user and
            machine).
        progress: Called with the number of finished measurements and about how many there are;
            without one, a warning says what is being waited for.
    """
    path = profile_path(backbone, directory)
    if (stored := _read_agreed(backbone, path)) is not None:
        return stored
    level = logging.WARNING if progress is None else logging.INFO
    message = (
        "measuring how fast %s runs on %s, once: this takes some seconds, up to minutes on a busy "
        "machine"
    )
    if backbone.ranks.rank == 0:
        _log.log(
            level,
            message,
            backbone.name,
            device_name(backbone.device, num_ranks=backbone.ranks.size),
        )
    profile = agreed_profile(backbone, measure_profile(backbone, progress))
    keep_profile(backbone, profile, directory)
    return profile


def profile_to_start_with(
    backbone: Backbone,
    directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Profile, bool]:
    """Return the profile from disk, or a quick and cautious one to serve with until a whole one is
    measured.

    Only a CPU is measured beside requests: a GPU is measured whole, as by `load_profile`.

    Returns:
        The profile, and whether it is provisional.
    """
    if (stored := _read_agreed(backbone, profile_path(backbone, directory))) is not None:
        return stored, False
    if backbone.device.type != "cpu":
        return load_profile(backbone, directory, progress), False
    return agreed_profile(backbone, quick_profile(backbone, progress)), True


def agreed_profile(backbone: Backbone, profile: Profile) -> Profile:
    """Return rank 0's profile on every rank."""
    if backbone.group.size == 1:
        return profile
    agreed = _of_rank_0(backbone.group, profile)
    assert agreed is not None
    return agreed


def _read_agreed(backbone: Backbone, path: Path) -> Profile | None:
    """Return the profile that rank 0 finds in a file, on every rank; None if it finds none."""
    if backbone.group.size == 1:
        return read_profile(path)
    return _of_rank_0(backbone.group, read_profile(path) if backbone.group.rank == 0 else None)


def _of_rank_0(group: RankGroup, profile: Profile | None) -> Profile | None:
    """Return rank 0's profile, if it has one, on every rank."""
    encoded = group.agree_bytes(b"" if profile is None else json.dumps(profile.to_json()).encode())
    return Profile.from_json(json.loads(encoded)) if encoded else None


def keep_profile(backbone: Backbone, profile: Profile, directory: Path | None = None) -> None:
    """Write a profile where `load_profile` finds it; of several ranks rank 0 does."""
    if backbone.ranks.rank == 0:
        write_profile(profile_path(backbone, directory), _identity(backbone), profile)


def profile_path(backbone: Backbone, directory: Path | None = None) -> Path:
    """Return the file of the profile of a model on this device."""
    key = json.dumps(_identity(backbone), sort_keys=True)
    directory = directory or _directory()
    return directory / (hashlib.sha256(key.encode()).hexdigest()[:24] + ".json")


def stored_profile(
    config: "PretrainedConfig", directory: Path | None = None
) -> tuple[str, Profile] | None:
    """Return the newest kept profile of a whole model of this shape, and a description of what it
    was measured with; None if there is none.

    The model itself is not needed.
    """
    directory, shape = directory or _directory(), _of_shape(config)
    for path in sorted(
        directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    ):
        of = read_identity(path) or {}
        if (
            shape.items() <= of.items()
            and "ranks" not in of
            and (profile := read_profile(path)) is not None
        ):
            return f"{of['device']}, {str(of['dtype']).removeprefix('torch.')}", profile
    return None


def _directory() -> Path:
    return cache_directory() / "profiles"


def _of_shape(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the part of what a profile depends on that is not of the device."""
    shape = {
        name: value for name, value in sorted(config.to_dict().items()) if not name.startswith("_")
    }
    return {
        "model": hashlib.sha256(
            json.dumps(shape, default=str, sort_keys=True).encode()
        ).hexdigest(),
        "torch": torch.__version__,
        "coserve": VERSION,
        "code": _code(),
    }


def _identity(backbone: Backbone) -> dict[str, Any]:
    """Return what a profile depends on."""
    return {
        **_of_shape(backbone.architecture.config),
        "device": device_name(backbone.device, num_ranks=backbone.ranks.size),
        "dtype": str(backbone.dtype),
        "kernels": backbone.backend.identity,
        "weights": backbone.weight_format,
        "block_rows": backbone.block_rows,
        # Of one rank they are named as they were before there were more.
        **({"ranks": backbone.ranks.size} if backbone.ranks.size > 1 else {}),
    }


@cache
def _code() -> str:
    """Return a digest of the code that is measured: during development, the version number says too
    little.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.glob("*/**/*.*")):
        if (
            path.suffix in (".py", ".cpp", ".h")
            and path.relative_to(_PACKAGE).parts[0] in _MEASURED
        ):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def device_name(device: torch.device, threads: int | None = None, *, num_ranks: int = 1) -> str:
    """Return a name of the device that runs the model, with its threads (None: those of this
    process).

    Where two ranks hold the model together, on such a device each, "2 x " comes first.
    """
    several = f"{num_ranks} x " if num_ranks > 1 else ""
    if device.type == "cuda":
        return several + torch.cuda.get_device_name(device)
    threads = threads or torch.get_num_threads()
    return f"{several}{processor_name()}, {threads} thread{'s' * (threads > 1)}"


def processor_name() -> str:
    """Return the model of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
