"""A recording run again: the engine decides anew, by the recorded clock and results, and a device works along."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from coserve.devices.base import Device
from coserve.devices.replay import DivergedError, EndOfRecordingError, Lines, ReplayDevice
from coserve.engine.core import EngineCore
from coserve.engine.engine import Engine
from coserve.engine.prompts import load_tokenizer
from coserve.engine.recording import (
    AddTokens,
    Arrive,
    Cancel,
    EnsureFiles,
    Files,
    FinishLoad,
    Header,
    Hold,
    Input,
    LoadFiles,
    OnJob,
    Step,
    Stop,
    SubmitExamples,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import CoserveError, DataError, ModelError
from coserve.models.source import find_model


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """plans_equal: whether there were steps, and the engine did in each what it did then; diverged: why not, in words.
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
        DataError: the device is another one. ModelError: the model's tokenizer, which says where stop strings end a
        text, is not to be had.
    """
    for name in ("dtype", "vocab_size", "num_layers", "num_pages", "page_bytes", "block_tokens", "num_host_pages"):
        if (recorded := getattr(header.info, name)) != (own := getattr(device.info, name)):
            raise DataError(f"the recording is of a device with {name} {recorded}; this one has {own}")
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
    except EndOfRecordingError:
        pass
    except DivergedError as error:
        diverged = str(error)
    if not replayed.num_steps and diverged is None:
        diverged = "the recording has no step"
    return ReplayReport(
        steps=replayed.num_steps,
        plans_equal=diverged is None,
        tokens_equal=replayed.tokens_equal,
        max_loss_difference=replayed.max_loss_difference,
        diverged=diverged,
    )


def _engine(header: Header, device: ReplayDevice) -> Engine:
    if not header.has_tokenizer:
        return Engine(device, header.config, end_tokens=header.end_tokens)
    tokenizer = load_tokenizer(find_model(header.info.model, with_weights=False))
    if tokenizer is None:
        raise ModelError(f"{header.info.model} had a tokenizer when it was recorded, and has none now")
    return Engine(device, header.config, tokenizer=tokenizer, end_tokens=header.end_tokens)


def _ask_again(engine: EngineCore, line: Input, device: ReplayDevice) -> None:
    """Do what the engine was asked to do. Errors are as they were then: what they depend on is compared."""
    try:
        _ask(engine, line)
    except CoserveError:
        pass
    except Exception as error:
        if error is not device.raised:
            raise


def _ask(engine: EngineCore, line: Input) -> None:
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
    elif isinstance(line, OnJob):
        getattr(engine, line.method)(line.job)
    else:
        _ask_with_files(engine, line)


def _ask_with_files(engine: EngineCore, line: LoadFiles | EnsureFiles | FinishLoad | SubmitExamples) -> None:
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
    """Files where they can be read, for a moment."""
    with TemporaryDirectory(prefix="coserve-replay-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        yield Path(name)
