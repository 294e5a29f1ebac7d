"""An engine that writes everything that decides its steps to a file: commands, clock readings, and
the device's work.

A recording holds the files of the adapters and checkpoints that the engine loaded; of the model it
holds only the name. The frames of the file are those of `coserve.engine.commands`,
`coserve.devices.recording.device` and `recorded_lines.py`.
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
    """An engine that does everything in view of a recording."""

    def __init__(self, plain: Engine, writer: FrameWriter) -> None:
        """Begin where an engine is that has not done anything yet; that one must not be used any
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
        """Write the command with what it reads, then do it."""
        if (
            isinstance(command, FlushCommands) and not self.log.has_commands
        ):  # a server without work asks all the time
            return None
        if isinstance(command, AddRequest) and not isinstance(command.prompt, list | tuple):
            command = replace(
                command, prompt=list(command.prompt)
            )  # a library's caller may give any sequence
        found = self._what_it_reads(command, read)
        self._writer.write(*(() if found is None else (found,)), command)
        if isinstance(read, AdapterLoad):
            self._recorded.note(OpenVersion(read.key, read.directory, read.model), read.opened)
        try:
            return super().handle(command, read)
        finally:
            self._writer.flush()

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        load = super().begin_load(name, directory)
        if load is not None:
            load.device = (
                self._plain_device
            )  # read at any moment, but written down when it is served
        return load

    def _what_it_reads(
        self, command: EngineCommand, read: AdapterLoad | JobExamples | None
    ) -> ReadFiles | None:
        """Return the contents of the files that a command names, and what was read for it; None if
        it reads none.
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
    """Have an engine that has not done anything yet written down, to this file; or with a number
    after its name if it is there already, so that an engine that was started again does not
    overwrite what its end looked like. DataError if it cannot be written.
    """
    for number in count():
        try:
            return RecordingEngine(engine, FrameWriter(f"{path}.{number}" if number else path))
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    raise AssertionError("numbers do not end")
