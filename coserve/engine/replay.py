"""A recording run again: the engine decides anew, by the recorded clock and results, and a device works along."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from coserve.devices.base import Device
from coserve.devices.messages import DeviceInfo
from coserve.devices.replay import DamagedRecordingError, DivergedError, EndOfRecordingError, Lines, ReplayDevice
from coserve.engine.command_log import LostCommandError
from coserve.engine.engine import Engine
from coserve.engine.prompts import load_tokenizer
from coserve.engine.recorded_lines import (
    AddTokens,
    Arrive,
    Cancel,
    EnsureFiles,
    Files,
    FinishLoad,
    FlushCommands,
    Header,
    Hold,
    Input,
    LoadFiles,
    OnJob,
    SaveVersion,
    Step,
    Stop,
    SubmitExamples,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.served_adapters import AdapterLoad
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError, DataError, ModelError
from coserve.models.source import find_here, find_model

_log = logging.getLogger(__name__)

# The fields of `DeviceInfo` that the device must share with the recorded one. The engine's plans depend on them, and so
# do the bounds of what the device reads and writes.
_EQUAL_FIELDS = (
    *("dtype", "vocab_size", "num_layers", "max_positions"),
    *("num_pages", "block_tokens", "num_host_pages", "num_state_pages"),
)
_MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of a replay.

    plans_equal: whether there were steps, and the engine did in each what it did then; diverged: why not, in words.
    max_loss_difference: of any pack's mean loss.
    """

    steps: int
    plans_equal: bool
    tokens_equal: bool
    max_loss_difference: float
    diverged: str | None = None


def replay(header: Header, lines: Iterator[object], device: Device) -> ReplayReport:
    """Run a recording again, up to its end or to where the engine does something else.

    Args:
        device: with the model, the pages and the profile of the recorded one; it works along, and is compared.

    Raises:
        DataError: the device is another one, or the recording is damaged.
        ModelError: the model's tokenizer, which says where stop strings end a text, is missing.
    """
    check_same_device(header.info, device.info)
    stream = Lines(lines)
    # Without the file of its profile, which is this machine's.
    replayed = ReplayDevice(msgspec.structs.replace(header.info, profile_path=""), device, stream)
    diverged: str | None = None
    try:
        engine = _engine(header, replayed)
        while (line := stream.take()) is not None:
            if not isinstance(line, Input):
                raise DivergedError(f"{line} was recorded, where the engine has nothing to do")
            _ask_again(engine, line, replayed)
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


def with_models_here(header: Header) -> Header:
    """Return the header with the directories of its models on this machine, so that nothing is fetched for it.

    Raises:
        ModelError: a model is not on this machine.
    """
    trainable = {name: find_here(model) for name, model in header.config.trainable_models.items()}
    return msgspec.structs.replace(
        header,
        info=msgspec.structs.replace(header.info, model=find_here(header.info.model)),
        config=replace(header.config, trainable_models=trainable),
    )


def check_same_device(recorded: DeviceInfo, own: DeviceInfo) -> None:
    """Raise DataError, naming the first difference, unless plans for the recorded device can run on this one."""
    for name in _EQUAL_FIELDS:
        if getattr(recorded, name) != getattr(own, name):
            raise DataError(
                f"the recording is of a device with {name} {getattr(recorded, name)}; this one has {getattr(own, name)}"
            )
    # What the ranks of the recorded device have together in a page must fit into one: they may hold copies of heads.
    num_ranks = 1 if own.num_ranks == recorded.num_ranks else recorded.num_ranks
    needed_bytes = num_ranks * recorded.page_bytes
    if own.page_bytes != needed_bytes and (num_ranks == 1 or own.num_ranks > 1 or own.page_bytes < needed_bytes):
        raise DataError(
            f"the recording is of a device with page_bytes {recorded.page_bytes} on each of "
            f"{recorded.num_ranks} ranks; this one has {own.page_bytes} on each of {own.num_ranks}"
        )


def _why_it_ended(error: Exception) -> str | None:
    """Return what the replayed engine did otherwise than the recorded one, if that is why the replay ended.

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


def _engine(header: Header, device: ReplayDevice) -> Engine:
    if not header.has_tokenizer:
        return Engine(device, header.config, end_tokens=header.end_tokens)
    tokenizer = load_tokenizer(find_model(header.info.model, with_weights=False))
    if tokenizer is None:
        raise ModelError(f"{header.info.model} had a tokenizer when it was recorded, and has none now")
    return Engine(device, header.config, tokenizer=tokenizer, end_tokens=header.end_tokens)


def _ask_again(engine: TokenEngine, line: Input, device: ReplayDevice) -> None:
    """Do what the engine was asked to do. Errors are as they were then: what they depend on is compared."""
    try:
        _ask(engine, line)
    except CoserveError:
        pass
    except Exception as error:
        is_lost = isinstance(error, LostCommandError)
        if (error.__cause__ if is_lost else error) is not device.raised:
            raise


def _ask(engine: TokenEngine, line: Input) -> None:
    """Do what the engine was asked to do."""
    if isinstance(line, Step):
        engine.step()
    elif isinstance(line, AddTokens):
        engine.add_tokens(
            line.prompt,
            line.params,
            adapter=line.adapter,
            slo=line.slo,
            request_id=line.request_id,
            arrival_s=line.arrival_s,
            tenant=line.tenant,
            priority=line.priority,
            batch_due_s=line.batch_due_s,
            without_jobs=line.without_jobs,
        )
    elif isinstance(line, UseVocabulary):
        engine.use_vocabulary(line.pieces, line.special)
    elif isinstance(line, Cancel):
        engine.cancel(line.request)
    elif isinstance(line, Stop):
        engine.stop(line.request, line.index, line.num_tokens)
    elif isinstance(line, Hold):
        engine.hold(line.request)
    elif isinstance(line, Arrive):
        engine.arrive(line.request, line.blocks)
    elif isinstance(line, UnloadAdapter):
        engine.unload_adapter(line.name)
    elif isinstance(line, FlushCommands):
        engine.flush_commands()
    elif isinstance(line, SaveVersion):
        engine.save_adapter(line.label, "")
    elif isinstance(line, OnJob):
        _ask_of_job(engine, line)
    else:
        _ask_with_files(engine, line)


def _ask_of_job(engine: TokenEngine, line: OnJob) -> None:
    """Call the method of a job that the line names."""
    match line.method:
        case "pause_job":
            engine.pause_job(line.job)
        case "resume_job":
            engine.resume_job(line.job)
        case "cancel_job":
            engine.cancel_job(line.job)
        case "forget_job":
            engine.forget_job(line.job)
        case "checkpoint":
            engine.checkpoint(line.job)


def _ask_with_files(engine: TokenEngine, line: LoadFiles | EnsureFiles | FinishLoad | SubmitExamples) -> None:
    if isinstance(line, LoadFiles):
        with _directory(line.files) as directory:
            engine.load_adapter(line.name, str(directory), line.model)
    elif isinstance(line, EnsureFiles):
        with _directory(line.files) as directory:
            engine.ensure_adapter(line.name, str(directory), line.model)
    elif isinstance(line, FinishLoad):
        with _directory(line.files) as directory:
            engine.finish_load(AdapterLoad(engine.device, engine.versions, line.name, line.key, str(directory)).read())
    else:
        with _directory(line.checkpoint or {}) as directory:
            engine.submit_examples(
                line.examples,
                line.config,
                adapter=line.adapter,
                name=line.name,
                validation=line.validation,
                job_id=line.job_id,
                checkpoint=None if line.checkpoint is None else directory,
                tenant=line.tenant,
                alone_until_step=line.alone_until_step,
                model=line.model,
            )


@contextmanager
def _directory(files: Files) -> Iterator[Path]:
    """Write the files of an adapter or a checkpoint to a temporary directory, which is removed afterwards."""
    with TemporaryDirectory(prefix="coserve-replay-") as name:
        for file, content in files.items():  # `FileName` has plain names alone
            (Path(name) / file).write_bytes(content)
        yield Path(name)
