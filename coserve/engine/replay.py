"""Replay of a recording: the engine decides anew by the recorded clock and results, and a device
works along.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import structs

from coserve.devices.base import Device
from coserve.devices.messages.commands import DeviceInfo
from coserve.devices.messages.jobs import ReadContributions
from coserve.devices.recording.device import Files
from coserve.devices.recording.replay import (
    DamagedRecordingError,
    DivergedError,
    EndOfRecordingError,
    RecordedLines,
    ReplayDevice,
)
from coserve.engine.command_log import LostCommandError
from coserve.engine.commands import (
    CombineJob,
    EngineCommand,
    JobExamples,
    LoadAdapter,
    StartJob,
    Step,
)
from coserve.engine.core import EngineCore
from coserve.engine.engine import Engine
from coserve.engine.prompts import load_tokenizer
from coserve.engine.recorded_lines import ReadFiles, RecordingHeader
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import CoserveError, DataError, ModelError
from coserve.models.source import find_here, find_model

_log = logging.getLogger(__name__)

# The fields of `DeviceInfo` that the device must share with the recorded one. The engine's plans
# depend on them, and so do the bounds of what the device reads and writes.
_EQUAL_FIELDS = (
    *("dtype", "vocab_size", "num_layers", "max_positions"),
    *("num_pages", "block_tokens", "num_host_pages", "num_state_pages"),
)
_MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Result of a replay."""

    steps: int
    """Number of steps that were replayed."""
    plans_equal: bool
    """Whether there were steps, and each was planned as it was recorded."""
    tokens_equal: bool
    """Whether the device has generated the recorded tokens."""
    max_loss_difference: float
    """Largest difference of a pack's mean loss from the recorded one."""
    diverged: str | None = None
    """Reason for which the plans are not equal, in words."""


def replay(header: RecordingHeader, lines: Iterator[object], device: Device) -> ReplayReport:
    """Run a recording again, up to its end or to where the engine does something else.

    Args:
        device: A device with the model, the pages and the profile of the recorded one; it does the
            work again, and its results are compared.

    Raises:
        DataError: the device is another one, or the recording is damaged.
        ModelError: the model's tokenizer, which decides where stop strings end a text, is missing.
    """
    check_same_device(header.info, device.info)
    stream = RecordedLines(lines)
    # Without the file of its profile, which is this machine's.
    replayed = ReplayDevice(structs.replace(header.info, profile_path=""), device, stream)
    diverged: str | None = None
    try:
        engine = _engine(header, replayed)
        while (line := stream.take()) is not None:
            read = line if isinstance(line, ReadFiles) else ReadFiles()
            command = stream.take() if isinstance(line, ReadFiles) else line
            if command is None:  # its process was killed between the two frames
                break
            if not isinstance(command, EngineCommand):
                raise DivergedError(f"{command} was recorded, where the engine has nothing to do")
            _handle_again(engine, command, read, replayed)
    except Exception as error:
        diverged = _why_it_ended(replayed.stopped or error)
    if not replayed.num_steps and diverged is None:
        diverged = "the recording has no step"
    return ReplayReport(
        steps=replayed.num_steps,
        plans_equal=diverged is None,
        tokens_equal=replayed.tokens_equal,
        max_loss_difference=replayed.max_loss_difference,
        diverged=diverged,
    )


def with_models_here(header: RecordingHeader) -> RecordingHeader:
    """Return the header with the directories of its models on this machine, so that nothing is
    fetched for it.

    Raises:
        ModelError: a model is not on this machine.
    """
    trainable = {name: find_here(model) for name, model in header.config.trainable_models.items()}
    return structs.replace(
        header,
        info=structs.replace(header.info, model=find_here(header.info.model)),
        config=replace(header.config, trainable_models=trainable),
    )


def check_same_device(recorded: DeviceInfo, own: DeviceInfo) -> None:
    """Raise DataError, naming the first difference, unless plans for the recorded device can run on
    this one.
    """
    for name in _EQUAL_FIELDS:
        if getattr(recorded, name) != getattr(own, name):
            raise DataError(
                f"the recording is of a device with {name} {getattr(recorded, name)}; this one has "
                f"{getattr(own, name)}"
            )
    # The pages of all recorded ranks together must fit into one page here: the ranks may hold
    # copies of heads.
    num_ranks = 1 if own.num_ranks == recorded.num_ranks else recorded.num_ranks
    needed_bytes = num_ranks * recorded.page_bytes
    if own.page_bytes != needed_bytes and (
        num_ranks == 1 or own.num_ranks > 1 or own.page_bytes < needed_bytes
    ):
        raise DataError(
            f"the recording is of a device with page_bytes {recorded.page_bytes} on each of "
            f"{recorded.num_ranks} ranks; this one has {own.page_bytes} on each of {own.num_ranks}"
        )


def _why_it_ended(error: Exception) -> str | None:
    """Return how the replayed engine differed from the recorded one, if that has ended the replay.

    Raises:
        DataError: a line of the recording cannot be read.
    """
    if isinstance(error, EndOfRecordingError):
        return None
    if isinstance(error, DivergedError):
        return str(error)
    if isinstance(error, DamagedRecordingError):
        raise DataError(str(error)) from None
    if isinstance(error, CoserveError):
        raise error
    _log.debug("the replayed engine failed", exc_info=error)
    reason = " ".join(str(error).split())[:_MAX_REASON]
    return f"the engine raised {type(error).__name__}, and did not when it was recorded: {reason}"


def _engine(header: RecordingHeader, device: ReplayDevice) -> Engine:
    if not header.has_tokenizer:
        return Engine(device, header.config, end_tokens=header.end_tokens)
    tokenizer = load_tokenizer(find_model(header.info.model, with_weights=False))
    if tokenizer is None:
        raise ModelError(
            f"{header.info.model} had a tokenizer when it was recorded, and has none now"
        )
    return Engine(device, header.config, tokenizer=tokenizer, end_tokens=header.end_tokens)


def _handle_again(
    engine: EngineCore, command: EngineCommand, read: ReadFiles, device: ReplayDevice
) -> None:
    """Have the engine handle a command. Errors are those of the recording: their causes are
    compared.
    """
    try:
        with ExitStack() as stack:
            contents = read.directories
            if not contents and isinstance(command, LoadAdapter | StartJob):
                contents = ({},)
            directories = [stack.enter_context(_directory(files)) for files in contents]
            _handle(engine, command, read, directories)
    except CoserveError:
        pass
    except Exception as error:
        is_lost = isinstance(error, LostCommandError)
        if (error.__cause__ if is_lost else error) is not device.raised:
            raise


def _handle(
    engine: EngineCore, command: EngineCommand, read: ReadFiles, directories: Sequence[str]
) -> None:
    """Have the engine handle a command with other directories in place of those that it names."""
    beside: AdapterLoad | JobExamples | None = None
    match command:
        case LoadAdapter(adapter=adapter):
            if adapter.directory is not None:
                command = structs.replace(
                    command, adapter=replace(adapter, directory=directories[0])
                )
            if read.version:
                load = AdapterLoad(
                    engine.device, engine.versions, adapter.name, read.version, directories[0]
                )
                beside = load.read()
        case StartJob(job=job):
            if job.checkpoint is not None:
                command = structs.replace(command, job=replace(job, checkpoint=directories[0]))
            beside = JobExamples(examples=read.examples, validation=read.validation)
        case CombineJob() if directories:
            engine.device.execute(ReadContributions(command.id, tuple(directories)))
    engine.handle(command, beside)
    if isinstance(command, Step):
        engine.finish_step()


@contextmanager
def _directory(files: Files) -> Iterator[str]:
    """Write the files of an adapter or a checkpoint to a temporary directory, which is removed
    afterwards.
    """
    with TemporaryDirectory(prefix="coserve-replay-") as name:
        for file, content in files.items():  # `FileName` has plain names alone
            (Path(name) / file).write_bytes(content)
        yield name
