"""Validation of a job's files, its first stage: they are read, checked, and written as examples for
the engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coserve.errors import DataError, EngineGoneError, JobError, StoreError
from coserve.home import is_disk_full
from coserve.jobs.datasets.examples import read_training_file, write_examples_file
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.models import BaseModel, JobModels
from coserve.jobs.records import FileRecord, JobRecord
from coserve.jobs.settings import JobSettings
from coserve.tuning.evaluation import questions_of
from coserve.tuning.examples import Example
from coserve.tuning.order import TrainingOrder
from coserve.tuning.reading_report import ReadingReport

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Seconds before the next attempt to read files, doubled each time; and between looks meanwhile.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LOOK_S = 1.0, 32.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Numbers and remarks about a job's files."""

    num_examples: int
    """Number of training examples."""
    num_tokens: int
    """Number of tokens of one epoch."""
    num_steps: int
    """Number of optimizer steps of the job."""
    num_cut: int
    """Number of examples that were cut because they are too long."""
    warnings: tuple[str, ...] = ()
    """Messages for the job's events about records, or parts of records, that are not trained on."""


def validate(
    job: JobRecord,
    files: Files,
    folders: Folders,
    model: BaseModel,
    is_wanted: Callable[[float], bool],
) -> Validated:
    """Read a job's files and write its examples; this blocks for as long as tokenizing takes.

    Args:
        job: The job.
        files: Files of the server.
        folders: Folders in which jobs keep their examples.
        model: Model that the job trains.
        is_wanted: Called before each line with the share of the files' bytes read so far; returns
            whether to continue.

    Raises:
        JobError: The message names the field, and lines and reasons of the first ten different
            faults; or `is_wanted` returned False.
        StoreError, OSError: The disk fails, because it is full, say.
    """
    settings = JobSettings.from_data(job.settings)
    training = _record_of(job, "training_file", files)
    validation = None if job.validation_file is None else _record_of(job, "validation_file", files)
    warnings = list[str]()
    num_bytes = training.num_bytes + (validation.num_bytes if validation else 0)

    def read(field: str, record: FileRecord, num_before: int) -> list[Example]:
        report = ReadingReport(is_strict=settings.strict)
        try:
            examples = read_training_file(
                Path(files.path(record)),
                model.tokenizer,
                max_sequence_length=settings.max_sequence_length,
                vocab_size=model.architecture.vocab_size,
                name=record.filename,
                objective=settings.objective,
                end_tokens=model.end_tokens,
                report=report,
                is_wanted=lambda num_read: is_wanted((num_before + num_read) / max(1, num_bytes)),
            )
        except DataError as error:
            raise JobError(f"{field} {record.id}: {error}", param=field) from None
        warnings.extend(_warnings(report, field, record, model.name))
        return examples

    examples = read("training_file", training, 0)
    write_examples_file(folders.examples(job.id), examples)
    folders.shared.keep(folders.examples(job.id))
    if validation is not None:
        held_out = read("validation_file", validation, training.num_bytes)
        try:
            # Checked now rather than by the engine in the middle of training.
            questions_of(held_out, settings.evaluation)
        except DataError as error:
            raise JobError(
                f"validation_file {validation.id}: {error}", param="validation_file"
            ) from None
        write_examples_file(folders.validation(job.id), held_out)
        folders.shared.keep(folders.validation(job.id))
    return Validated(
        num_examples=len(examples),
        num_tokens=sum(len(example.tokens) for example in examples),
        num_steps=TrainingOrder(examples, settings.tuning_config(len(examples))).num_steps,
        num_cut=sum(example.truncated for example in examples),
        warnings=tuple(warnings),
    )


def _warnings(report: ReadingReport, field: str, record: FileRecord, model: str) -> list[str]:
    """Return messages about the records of a file that are not trained on."""
    warnings = [f"{field} {record.id}: {line} (model {model})" for line in report.warnings.lines()]
    if count := report.left_out.num_places:
        examples = "1 example was" if count == 1 else f"{count:,} examples were"
        warnings.append(
            f"{field} {record.id}: {examples} left out: {'; '.join(report.left_out.lines())}"
        )
    return warnings


def _record_of(job: JobRecord, field: str, files: Files) -> FileRecord:
    id = getattr(job, field)
    record = files.find(job.tenant, id)
    if record is None:
        raise JobError(f"{field} {id} is not there any more", param=field)
    return record


class FileReader:
    """A reader of jobs' files, in a thread, one job after the other. Belongs to one event loop."""

    def __init__(
        self,
        files: Files,
        folders: Folders,
        models: JobModels,
        done: Callable[[str, Validated | JobError], Awaitable[None]],
    ) -> None:
        """Pass the result of each job's files to `done`."""
        self._files, self._folders, self._models, self._done = files, folders, models, done
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwanted: set[str] = set()
        self._shares: dict[str, float] = {}
        self._one_at_a_time = asyncio.Semaphore(1)

    def begin(self, job: JobRecord) -> None:
        """Start to read a job's files, unless that is under way."""
        if job.id not in self._tasks:
            self._tasks[job.id] = asyncio.create_task(self._read(job))

    def stop(self, id: str) -> None:
        """Stop reading a job's files soon; the result does not matter any more."""
        if id in self._tasks:
            self._unwanted.add(id)

    def stop_all(self) -> None:
        """Stop reading the files of all jobs soon."""
        self._unwanted |= self._tasks.keys()

    def share_read(self, id: str) -> float | None:
        """Return the share of the bytes of a job's files that was read; 0 while the job waits for
        its turn, None if its files are not being read.
        """
        return self._shares.get(id, 0.0) if id in self._tasks else None

    async def wait(self) -> None:
        """Wait until no files are being read."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _read(self, job: JobRecord) -> None:
        try:
            result = await self._again(job.id, lambda: self._validate_in_turn(job))
            await self._again(job.id, lambda: self._done(job.id, result))
        except (EngineGoneError, StoreError, OSError):
            pass  # shutting down: the files are read at the next start
        finally:  # last, so that a client that resumes the job meanwhile starts no second reading
            del self._tasks[job.id]
            self._unwanted.discard(job.id)
            self._shares.pop(job.id, None)

    async def _again(self, id: str, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeat an operation until the disk and the store accept it; try only once for a job that
        is not wanted any more.
        """
        for wait_s in _waits_s():
            try:
                return await do()
            except (StoreError, OSError) as error:
                if id in self._unwanted:
                    raise
                _log.error(
                    "the files of job %s wait, and are read again in %.0f s: %s", id, wait_s, error
                )
            # Short sleeps, so that a job that is not wanted any more stops waiting soon.
            while wait_s > 0 and id not in self._unwanted:
                await asyncio.sleep(min(_LOOK_S, wait_s))
                wait_s -= _LOOK_S
        raise AssertionError

    async def _validate_in_turn(self, job: JobRecord) -> Validated | JobError:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._validate, job)

    def _validate(self, job: JobRecord) -> Validated | JobError:
        def is_wanted(share: float) -> bool:
            self._shares[job.id] = share
            return job.id not in self._unwanted

        try:
            return validate(job, self._files, self._folders, self._models[job.base], is_wanted)
        except JobError as error:
            return error
        # `_again` repeats what a store or a full disk refused; anything else fails the job.
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and is_disk_full(error):
                raise
            _log.exception("the files of %s could not be read", job.id)
            return JobError(f"the files could not be read: {error!r}", param="training_file")


def _waits_s() -> Iterator[float]:
    wait_s = _FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
