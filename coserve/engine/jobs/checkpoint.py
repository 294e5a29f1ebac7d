"""Checkpoints of jobs: all that it takes to resume a job as if nothing had happened.

A directory holds the adapter in PEFT's format (float32 masters, so it can be served and handed on),
the optimizer's state, and the job's position. The order of the data, the adapter's dropout and
everything else that is random are pure functions of the configuration's seed and of that position,
so there is no generator to keep. Only whole optimizer steps are kept: what had been done of the
next one is done again.
"""

import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from coserve.adapters.whole_files import read_small_file
from coserve.devices.base import Device
from coserve.devices.messages.commands import Command
from coserve.devices.messages.jobs import (
    OPTIMIZER_FILE,
    DropCheckpoint,
    TakeCheckpoint,
    WriteCheckpoint,
)
from coserve.engine.command_log import CommandLog
from coserve.errors import AdapterError, DiskFullError, JobError
from coserve.home import is_disk_full
from coserve.settings import check_number, check_whole, shown
from coserve.tuning.early_stopping import BestEvaluation

POSITION_FILE = "job.json"
_MAX_POSITION_BYTES = 1 << 16
# Files that only the job itself needs, to resume.
JOB_FILES = (POSITION_FILE, OPTIMIZER_FILE)


@dataclass(frozen=True, kw_only=True)
class JobPosition:
    """Position of a job, in whole optimizer steps.

    Raises:
        ValueError: when created, for numbers that no job has.
    """

    num_steps_done: int
    """Number of optimizer steps done."""
    num_tokens_trained: int
    """Number of tokens in these steps."""
    num_rows_run: float
    """Number of forward and reversed rows run, lost work included."""
    num_bad_steps: int
    """Number of latest steps in a row whose gradient was not finite."""
    evaluated: bool
    """Whether the evaluation after the last step is done, where one was due."""
    num_steps: int
    """Number of optimizer steps of the whole job, which identifies it with the next two."""
    num_examples: int
    """Number of examples of the job."""
    num_tokens: int
    """Number of tokens of its examples."""
    best: BestEvaluation = field(default_factory=BestEvaluation)
    """Best evaluation so far."""

    def __post_init__(self) -> None:
        for name in (
            "num_steps",
            "num_examples",
            "num_tokens",
            "num_tokens_trained",
            "num_bad_steps",
        ):
            check_whole(name, getattr(self, name), 0)
        check_whole("num_steps_done", self.num_steps_done, 0, self.num_steps)
        check_number("num_rows_run", self.num_rows_run, least=0)
        if not isinstance(self.evaluated, bool):
            raise ValueError(f"evaluated must be true or false, not {shown(self.evaluated)}")

    def check_is_of(self, job: "JobPosition") -> None:
        """Check that this is a position of a job, given that job's position at its beginning.

        Raises:
            JobError: it is another job's.
        """
        for name in ("num_steps", "num_examples", "num_tokens"):
            if getattr(job, name) != getattr(self, name):
                raise JobError(
                    f"the checkpoint is of a job with {getattr(self, name)} "
                    f"{name.removeprefix('num_')}; "
                    f"this one has {getattr(job, name)}"
                )


class TrainerState(Protocol):
    """A copy of a job's tensors, which later training does not touch."""

    def write(self, directory: Path) -> None:
        """Write the adapter, and the optimizer's state if there still is one.

        Raises:
            AdapterError: it cannot be written.
        """
        ...


class DeviceCopy:
    """A copy of a job's tensors that a device keeps until the last reference to this object is
    gone.
    """

    def __init__(self, device: Device, copy: str, send: Callable[[Command], None]) -> None:
        """Refer to a copy. send: has the device do a command at the next occasion; any thread may
        call it.
        """
        self.id = copy
        self._device = device
        # Not at exit: the device goes with the process, and the log may be gone.
        weakref.finalize(self, send, DropCheckpoint(copy)).atexit = False

    def write(self, directory: Path) -> None:
        self._device.execute(WriteCheckpoint(self.id, str(directory)))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A job's state at one moment. It is quick to take; any thread may write it later."""

    position: JobPosition
    """Position of the job."""
    state: TrainerState
    """Copy of its tensors."""

    def write(self, parent: str | Path) -> Path:
        """Write a directory `step-<n>` (`step-<n>-<k>` if there is one already) below `parent`,
        whole or not at all.

        Raises:
            JobError: it cannot be written.
            DiskFullError: there is no room.
        """
        parent = Path(parent)
        # Written under another name and renamed, so that an interrupted write leaves no checkpoint.
        part = parent / f".part-{uuid4().hex}"
        try:
            part.mkdir(parents=True)
            self.state.write(part)
            _write(part / POSITION_FILE, json.dumps(asdict(self.position), indent=2) + "\n")
            # Durable before the rename makes it visible.
            _sync(part)
            return _move(part, parent / f"step-{self.position.num_steps_done}")
        except OSError as error:
            if is_disk_full(error):
                raise DiskFullError(
                    f"the disk is full: cannot write a checkpoint to {parent}"
                ) from error
            raise JobError(
                f"cannot write a checkpoint to {parent}: {error.strerror or error}"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


class DeviceCopies:
    """A maker of copies of jobs' tensors on a device."""

    def __init__(self, device: Device, log: CommandLog) -> None:
        self._device, self._log = device, log
        self._numbers = count()

    def new(self, job: str) -> DeviceCopy:
        """Return a copy of a job's tensors that is still to be taken."""
        return DeviceCopy(self._device, f"{job}/{next(self._numbers)}", self._log.send)

    def checkpoint(self, job: str, position: JobPosition) -> Checkpoint:
        """Copy a job after its last whole optimizer step, at which it has this position."""
        copy = self.new(job)  # first, so that the copy goes with it in any case
        self._log.execute(TakeCheckpoint(job, copy.id))
        return Checkpoint(position=position, state=copy)


def write_contribution(state: TrainerState, directory: Path) -> Path:
    """Write what the other nodes of a job are to have to a directory of its own, and return it.

    Raises:
        JobError: it cannot be written.
        DiskFullError: there is no room.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        state.write(directory)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(f"the disk is full: cannot write to {directory}") from error
        raise JobError(
            f"what a job's other nodes are to have cannot be written to {directory}: "
            f"{error.strerror or error}"
        ) from error
    return directory


def read_position(directory: str | Path) -> JobPosition:
    """Return the position of a job at a checkpoint.

    Raises:
        JobError: the directory is not a checkpoint of a job.
    """
    path = Path(directory) / POSITION_FILE
    try:
        content = read_small_file(path, _MAX_POSITION_BYTES)
        return msgspec.json.decode(content or b"", type=JobPosition)
    except (AdapterError, ValueError, RecursionError):
        raise JobError(
            f"{directory} is not a checkpoint of a job: it has no usable {POSITION_FILE}"
        ) from None


def _move(part: Path, wanted: Path) -> Path:
    """Rename a directory to the wanted name, or with a number after it; renaming onto a directory
    that is not empty fails, so nothing is ever replaced.
    """
    number = 0
    while True:
        directory = wanted if not number else wanted.with_name(f"{wanted.name}-{number}")
        number += 1
        # Checked since renaming onto an empty directory would succeed.
        if directory.exists():
            continue
        part.rename(directory)
        _sync(directory.parent)
        return directory


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Make a directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
