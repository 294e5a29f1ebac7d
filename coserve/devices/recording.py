"""The stream between an engine and its device, written to a file: commands, replies, steps, results, clock readings.

A recording is a sequence of frames, each a length and msgpack: first the header, then lines in the order in which
things happened. The engine adds lines of its own, for what it was asked (`coserve.engine.recording`). What leaves no
trace in the engine or on the device is left out: files being written, and copies for checkpoints being let go, which
happens whenever Python collects them; how many commands were answered; the states of ranks; and grammars that are
compiled ahead. Pages that come from another instance are written down as they came.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from coserve.devices.base import Clock, Device
from coserve.devices.job_messages import DropCheckpoint, WriteCheckpoint
from coserve.devices.messages import (
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
from coserve.devices.step_messages import StepBatch, StepResult
from coserve.devices.wire import Raised, raised

_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode

_TRACELESS = (
    *(CountCommands, DropCheckpoint, ExportPages, SaveAdapter, WriteCheckpoint),
    *(SetVocabulary, OpenGrammar, CloseGrammar, DescribeRanks),
)


class ClockRead(msgspec.Struct, tag=True, frozen=True):
    """The engine looked at the clock."""

    now_s: float


class Executed(msgspec.Struct, tag=True, frozen=True):
    """A command was done, or raised an error."""

    command: Command
    reply: Reply = None
    error: Raised | None = None


class Submitted(msgspec.Struct, tag=True, frozen=True):
    """A step began."""

    batch: StepBatch


class Collected(msgspec.Struct, tag=True, frozen=True):
    """A step ended, with a result or an error."""

    result: StepResult | None = None
    error: Raised | None = None


DeviceLine = ClockRead | Executed | Submitted | Collected


class FrameWriter:
    """Writes frames to a file that is not there yet; `write` may be called from any thread."""

    def __init__(self, path: str | Path) -> None:
        """OSError if the file is there already, or cannot be written."""
        self._file: BinaryIO = Path(path).open("xb")  # noqa: SIM115
        self._lock = Lock()

    def write(self, line: Any) -> None:
        frame = _encode(line)
        with self._lock:
            self._file.write(_LENGTH.pack(len(frame)) + frame)

    def flush(self) -> None:
        """So that it is there even if this process is killed."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_frames(path: str | Path) -> Iterator[bytes]:
    """The frames of a file, up to the first that is not there as a whole: its process may have been killed."""
    with Path(path).open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > num_bytes - file.tell():  # of a file of another kind it may be any number
                return
            yield file.read(length)


class RecordingDevice:
    """A device, with all that crosses written down."""

    def __init__(self, device: Device, writer: FrameWriter) -> None:
        self._device, self._writer = device, writer
        self.info = device.info
        self.clock: Clock = _RecordingClock(device.clock, writer)

    def execute(self, command: Command) -> Reply:
        if isinstance(command, _TRACELESS):
            return self._device.execute(command)
        written = self._with_data(command)
        try:
            reply = self._device.execute(command)
        except Exception as error:
            self._writer.write(Executed(written, error=raised(None, error)))
            raise
        self._writer.write(Executed(written, reply))
        return reply

    def submit(self, batch: StepBatch) -> None:
        kept = with_trace(batch)
        if any(isinstance(command, ImportPages) for command in kept.commands):
            kept = replace(kept, commands=tuple(map(self._with_data, kept.commands)))
        self._writer.write(Submitted(kept))
        self._writer.flush()  # it may be the last
        self._device.submit(batch)

    def collect(self) -> StepResult:
        try:
            result = self._device.collect()
        except Exception as error:
            self._write_end(Collected(error=raised(None, error)))
            raise
        self._write_end(Collected(result))
        return result

    def _with_data(self, command: Command) -> Command:
        """With the pages that come from a file, which will be gone when the recording is run again."""
        if not isinstance(command, ImportPages):
            return command
        size, found = self.info.place_bytes, []
        with Path(command.path).open("rb") as file:
            for place in command.places:
                file.seek(place * size)
                found.append(file.read(size))
        return replace(command, data=b"".join(found))

    def _write_end(self, line: Collected) -> None:
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
    """A step without the commands that are left out of recordings."""
    kept = tuple(command for command in batch.commands if not isinstance(command, _TRACELESS))
    return batch if len(kept) == len(batch.commands) else replace(batch, commands=kept)


def leaves_a_trace(command: Command) -> bool:
    """Whether recordings have it."""
    return not isinstance(command, _TRACELESS)
