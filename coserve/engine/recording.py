"""An engine that records everything that decides its steps: commands, clock readings, and the
device's work.

A recording holds the files of the adapters and checkpoints that the engine loaded, but of the model
only its name. The frames of the file are those of `coserve.engine.commands`,
`coserve.devices.recording` and `recorded_lines.py`.
"""

from itertools import count
from typing import Any

from msgspec.structs import replace

from coserve.devices.messages.commands import OpenVersion
from coserve.devices.recording.device import FrameWriter, RecordingDevice, files_in
from coserve.engine.commands import (
    AddRequest,
    CombineJob,
    EngineCommand,
    FlushCommands,
    JobExamples,
    LoadAdapter,
    StartJob,
)
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import FORMAT, ReadFiles, RecordingHeader
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import DataError


class RecordingEngine(Engine):
    """An engine that writes a recording of all that it does."""

    def __init__(self, plain: Engine, writer: FrameWriter) -> None:
        """Take the place of an engine that has not done anything yet, and must not be used any
        more.
        """
        self._writer, self._plain_device = writer, plain.device
        self._recorded = RecordingDevice(plain.device, writer)
        writer.write(
            RecordingHeader(
                format=FORMAT,
                info=plain.device.info,
                config=plain.config,
                end_tokens=tuple(sorted(plain.end_tokens)),
                has_tokenizer=plain.tokenizer is not None,
            )
        )
        super().__init__(
            self._recorded,
            plain.config,
            tokenizer=plain.tokenizer,
            answers_tokenizer=plain.answers_tokenizer,
            end_tokens=tuple(sorted(plain.end_tokens)),
            latency=plain.latency,
        )

    def handle(self, command: EngineCommand, read: AdapterLoad | JobExamples | None = None) -> Any:
        """Record a command with the files that it reads, then handle it."""
        # A server without work flushes all the time.
        if isinstance(command, FlushCommands) and not self.log.has_commands:
            return None
        if isinstance(command, AddRequest) and not isinstance(command.prompt, list | tuple):
            # A caller in this process may pass any sequence.
            command = replace(command, prompt=list(command.prompt))
        files = self._what_it_reads(command, read)
        self._writer.write(*(() if files is None else (files,)), command)
        if isinstance(read, AdapterLoad):
            self._recorded.note(OpenVersion(read.key, read.directory, read.model), read.opened)
        try:
            return super().handle(command, read)
        finally:
            self._writer.flush()

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        load = super().begin_load(name, directory)
        if load is not None:
            # It is read at any moment, and recorded when it is served.
            load.device = self._plain_device
        return load

    def _what_it_reads(
        self, command: EngineCommand, read: AdapterLoad | JobExamples | None
    ) -> ReadFiles | None:
        """Return the contents of the files that a command names, and of what was read for it; None
        if it reads none.
        """
        if isinstance(read, AdapterLoad):
            return ReadFiles(directories=(files_in(read.directory),), version=read.key)
        match command:
            case LoadAdapter(adapter=adapter):
                is_read = adapter.directory is not None and (
                    command.stays or adapter.name not in self.versions
                )
                return (
                    ReadFiles(directories=(files_in(adapter.directory or ""),)) if is_read else None
                )
            case StartJob(job=job):
                assert isinstance(read, JobExamples)
                return ReadFiles(
                    directories=() if job.checkpoint is None else (files_in(job.checkpoint),),
                    examples=list(read.examples),
                    validation=list(read.validation),
                )
            case CombineJob():
                return ReadFiles(directories=self._recorded.contributions.pop(command.id, ()))
        return None


def record(engine: Engine, path: str) -> RecordingEngine:
    """Have everything recorded that an engine does, which has not done anything yet.

    A file that exists is not overwritten: the recording of an engine that was restarted gets a
    number after its name.

    Raises:
        DataError: the file cannot be written.
    """
    for number in count():
        try:
            return RecordingEngine(engine, FrameWriter(f"{path}.{number}" if number else path))
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    raise AssertionError("numbers do not end")
