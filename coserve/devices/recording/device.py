"""Recordings: the frames between an engine and its device, written to a file: commands, replies,
steps, results, clock readings.

A recording is a sequence of frames, each a length and msgpack: first the header, then what
happened, in order. The frames of the device are those of its wire (`coserve.devices.process.wire`),
and `ClockRead`; the engine adds the commands that it handled (`coserve.engine.recording`). What
leaves no trace in the engine or on the device is left out: files being written, and copies for
checkpoints being dropped, which happens whenever Python collects them; how many commands were
answered; the states of ranks; and grammars that are compiled ahead. What is read from files is in
the recording: pages of another instance within their command, contributions and adapters with the
engine's command that takes them in.
"""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal, get_args

import msgspec
from msgspec.structs import replace

from coserve.devices.base import Clock, Device
from coserve.devices.messages.commands import (
    CloseGrammar,
    Command,
    CountCommands,
    DescribeRanks,
    ExportPages,
    ImportPages,
    OpenGrammar,
    Reply,
    SaveAdapter,
    SetVocabulary,
)
from coserve.devices.messages.jobs import DropCheckpoint, ReadContributions, WriteCheckpoint
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.process.wire import LENGTH, Call, Done, Raised, framed, raised

_TRACELESS = (
    *(CountCommands, DropCheckpoint, ExportPages, SaveAdapter, WriteCheckpoint, ReadContributions),
    *(SetVocabulary, OpenGrammar, CloseGrammar, DescribeRanks),
)

# The files that a directory of an adapter, a checkpoint or a contribution may have in a recording.
# Replaying writes them to a directory, so any other name is an error of the recording.
FileName = Literal[
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "job.json",
    "contribution.safetensors",
]
Files = dict[FileName, bytes]


def files_in(directory: str | Path) -> Files:
    """Return the contents of those files of an adapter, a checkpoint or a contribution that are
    there.
    """
    names: tuple[FileName, ...] = get_args(FileName)
    return {name: path.read_bytes() for name in names if (path := Path(directory) / name).is_file()}


class ClockRead(msgspec.Struct, tag=True, frozen=True):
    """Reading of the clock by the engine."""

    now_s: float
    """What the clock showed."""


DeviceFrame = ClockRead | Call | Done | Raised


class FrameWriter:
    """Writer of frames to a new file; `write` may be called from any thread."""

    def __init__(self, path: str | Path) -> None:
        """Create the file.

        Raises:
            OSError: It is there already, or cannot be written.
        """
        self._file: BinaryIO = Path(path).open("xb")  # noqa: SIM115
        self._lock = Lock()

    def write(self, *messages: Any) -> None:
        """Write a frame for each message; no other frame comes between them."""
        frames = b"".join(map(framed, messages))
        with self._lock:
            self._file.write(frames)

    def flush(self) -> None:
        """Write what is buffered, so that it is in the file even if this process is killed."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_frames(path: str | Path) -> Iterator[bytes]:
    """Yield the frames of a file, up to the first that is cut short: its process may have been
    killed.
    """
    with Path(path).open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if length > num_bytes - file.tell():  # of a file of another kind it may be any number
                return
            yield file.read(length)


class RecordingDevice:
    """A device whose commands, steps and clock readings are recorded."""

    def __init__(self, device: Device, writer: FrameWriter) -> None:
        self._device, self._writer = device, writer
        self.info = device.info
        self.clock: Clock = _RecordingClock(device.clock, writer)
        self.contributions: dict[str, tuple[Files, ...]] = {}
        """Files of what each job's nodes have contributed, as they were read; not yet taken in."""
        self._calls = count()
        self._step = 0  # the call of the step that is under way

    def execute(self, command: Command) -> Reply:
        if isinstance(command, ReadContributions):
            self.contributions[command.job] = tuple(map(files_in, command.directories))
        if isinstance(command, _TRACELESS):
            return self._device.execute(command)
        call = Call(next(self._calls), self._with_data(command))
        try:
            reply = self._device.execute(command)
        except Exception as error:
            self._writer.write(call, raised(call.call, error))
            raise
        self._writer.write(call, Done(call.call, reply))
        return reply

    def note(self, command: Command, reply: Reply) -> None:
        """Record a command that was done beside steps, as if it were done now."""
        call = next(self._calls)
        self._writer.write(Call(call, command), Done(call, reply))

    def submit(self, batch: StepBatch) -> None:
        kept = with_trace(batch)
        if any(isinstance(command, ImportPages) for command in kept.commands):
            kept = replace(kept, commands=tuple(map(self._with_data, kept.commands)))
        self._step = next(self._calls)
        self._writer.write(Call(self._step, kept))
        self._writer.flush()  # it may be the last
        self._device.submit(batch)

    def collect(self) -> StepResult:
        try:
            result = self._device.collect()
        except Exception as error:
            self._write_end(raised(self._step, error))
            raise
        self._write_end(Done(self._step, result))
        return result

    def _with_data(self, command: Command) -> Command:
        """Return a command with the content of pages that come from a file."""
        if not isinstance(command, ImportPages):
            return command
        size, found = self.info.place_bytes, []
        with Path(command.path).open("rb") as file:
            for place in command.places:
                file.seek(place * size)
                found.append(file.read(size))
        return replace(command, data=b"".join(found))

    def _write_end(self, line: Done | Raised) -> None:
        self._writer.write(line)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        self._device.close()


class _RecordingClock:
    def __init__(self, clock: Clock, writer: FrameWriter) -> None:
        self._clock, self._writer = clock, writer

    def now(self) -> float:
        now_s = self._clock.now()
        self._writer.write(ClockRead(now_s))
        return now_s


def with_trace(batch: StepBatch) -> StepBatch:
    """Return a step without the commands that are left out of recordings."""
    kept = tuple(command for command in batch.commands if not isinstance(command, _TRACELESS))
    return batch if len(kept) == len(batch.commands) else replace(batch, commands=kept)


def leaves_a_trace(command: Command) -> bool:
    """Return whether recordings have a command."""
    return not isinstance(command, _TRACELESS)
