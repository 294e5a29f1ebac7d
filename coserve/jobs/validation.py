"""The first thing that happens to a job: its files are read, checked, and laid down as examples for the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.errors import DataError, JobError
from coserve.jobs.examples import read_training_file, write_examples_file
from coserve.jobs.files import Files
from coserve.jobs.folders import Folders
from coserve.jobs.records import JobRecord
from coserve.jobs.settings import JobSettings
from coserve.models.base import Architecture
from coserve.tuning.examples import Example
from coserve.tuning.order import TrainingOrder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What jobs must know of the model that is served. name: as clients and jobs call it."""

    name: str
    architecture: Architecture
    tokenizer: "PreTrainedTokenizerBase | None"


@dataclass(frozen=True, kw_only=True)
class Validated:
    """What was found in a job's files. num_tokens: of one epoch. num_cut: examples that were too long."""

    num_examples: int
    num_tokens: int
    num_steps: int
    num_cut: int


def validate(
    job: JobRecord, files: Files, folders: Folders, model: BaseModel, is_wanted: Callable[[], bool]
) -> Validated:
    """Read a job's files, and write its examples. Blocks for as long as tokenizing takes, and is_wanted says so.

    Raises:
        JobError: names the file's field, and the line and the reason of the first ten faults; or it is not wanted
        any more.
    """
    settings = JobSettings.from_data(job.settings)
    examples = _read(job, "training_file", files, model, settings, is_wanted)
    write_examples_file(folders.examples(job.id), examples)
    if job.validation_file is not None:
        validation = _read(job, "validation_file", files, model, settings, is_wanted)
        write_examples_file(folders.validation(job.id), validation)
    return Validated(
        num_examples=len(examples),
        num_tokens=sum(len(example.tokens) for example in examples),
        num_steps=TrainingOrder(examples, settings.tuning_config(len(examples))).num_steps,
        num_cut=sum(example.truncated for example in examples),
    )


def _read(
    job: JobRecord,
    field: str,
    files: Files,
    model: BaseModel,
    settings: JobSettings,
    is_wanted: Callable[[], bool],
) -> list[Example]:
    id = getattr(job, field)
    record = files.find(job.tenant, id)
    if record is None:
        raise JobError(f"{field} {id} is not there any more", param=field)
    try:
        return read_training_file(
            Path(files.path(record)),
            model.tokenizer,
            max_sequence_length=settings.max_sequence_length,
            vocab_size=model.architecture.vocab_size,
            is_wanted=is_wanted,
        )
    except DataError as error:
        raise JobError(f"{field} {id}: {error}", param=field) from None
