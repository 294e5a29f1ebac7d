"""Results of measurements as data: one JSON file per run, with the command, the code, the machine
and the numbers.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coserve.errors import CoserveError
from coserve.version import VERSION

_CHECKOUT = Path(__file__).parents[2]
# Environment variables that change how fast a run is.
_SETTINGS = ("OMP_NUM_THREADS", "COSERVE_KERNELS")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a measurement ran on."""

    processor: str
    """Model of the processor."""

    cores: int
    """Number of cores that the process may use."""

    memory_bytes: int
    """Memory of the machine."""

    accelerator: str | None
    """Name of the first GPU; None without one."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of a measurement."""

    experiment: str
    """Name of the measurement, such as `plan_time` or `decode`."""

    command: str
    """Command line that repeats the run."""

    version: str
    """Version of coserve."""

    commit: str | None
    """Commit of the checkout, with `+changes` where files differ from it; None without one."""

    date: str
    """End of the run, in ISO format, in UTC."""

    machine: Machine
    """Machine that the measurement ran on."""

    load: float
    """Load average of the machine over the last minute of the run, this process included."""

    numbers: Mapping[str, Any]
    """The measurement's own result, as its last line of output has it."""


def save_result(directory: Path, experiment: str, numbers: Mapping[str, Any]) -> Path:
    """Write a result into a new file of a directory.

    Args:
        directory: The directory, which is created if it does not exist.
        experiment: Name of the measurement.
        numbers: What it measured.

    Returns:
        Path of the file, `EXPERIMENT-DATE-COMMIT.json`.

    Raises:
        CoserveError: The file cannot be written.
    """
    now = datetime.now(UTC)
    result = Result(
        experiment=experiment,
        command=_command(),
        version=VERSION,
        commit=_commit(),
        date=now.isoformat(timespec="seconds"),
        machine=_machine(),
        load=round(os.getloadavg()[0], 2),
        numbers=numbers,
    )
    code = result.commit or f"v{VERSION}"
    path = directory / f"{_file_name(experiment)}-{now:%Y-%m-%dT%H%M%S}-{code}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(result), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise CoserveError(f"{path} cannot be written ({error.strerror})") from None
    return path


def read_result(path: Path) -> Result:
    """Read a file of `save_result`.

    Raises:
        CoserveError: The file cannot be read, or is not a result.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        return Result(**{**data, "machine": Machine(**data["machine"])})
    except OSError as error:
        raise CoserveError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError):
        raise CoserveError(f"{path} is not a result that --save has written") from None


def _machine() -> Machine:
    import torch

    from coserve.devices.profiles.kept import processor_name

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        processor=processor_name(),
        cores=cores or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        accelerator=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    )


def _command() -> str:
    """Return the command line of this process, without the place of its interpreter."""
    settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    program, arguments = "python", sys.orig_argv[1:]
    if arguments and Path(arguments[0]).name == "coserve":
        program, arguments = "coserve", arguments[1:]
    return shlex.join([*settings, program, *arguments])


def _commit() -> str | None:
    """Return the commit of the checkout that this package belongs to, if it is one."""
    if not (_CHECKOUT / ".git").exists():
        return None
    commit = _git("rev-parse", "--short", "HEAD")
    if commit is None:
        return None
    # A new result in benchmarks/ changes no code.
    has_changes = _git("status", "--porcelain", "--", "coserve", "experiments")
    return f"{commit}+changes" if has_changes else commit


def _git(*arguments: str) -> str | None:
    try:
        ran = subprocess.run(
            ["git", "-C", str(_CHECKOUT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _file_name(experiment: str) -> str:
    return re.sub(r"\W+", "_", experiment).strip("_")
