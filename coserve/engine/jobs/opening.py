"""Opening of jobs: arguments are checked, and the device makes a trainer.

A job begins with a fresh adapter, a served one, or a checkpoint; its packs are cut to fit the
memory.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from coserve.devices.base import Device
from coserve.devices.messages.jobs import (
    DropTrainer,
    OpenTrainer,
    OtherModel,
    TrainerOpened,
    group_bytes,
)
from coserve.engine.checks import check_adapter_name, check_examples, with_virtual_tokens
from coserve.engine.command_log import CommandLog
from coserve.engine.jobs.checkpoint import read_position
from coserve.engine.jobs.job import Job
from coserve.engine.page_manager import PageManager
from coserve.engine.served_adapters import AdapterVersions, ServedAdapters
from coserve.errors import AdapterError, DataError, DeviceGoneError, JobError
from coserve.settings import shown
from coserve.tuning.config import TuningConfig
from coserve.tuning.evaluation import Question, questions_of
from coserve.tuning.examples import Example
from coserve.tuning.order import packed_apart
from coserve.tuning.shard import Shard


class PeftFields(Protocol):
    """A PEFT method with its settings."""

    def to_peft(self) -> dict[str, Any]:
        """Return the fields of PEFT's adapter_config.json for it."""
        ...


class JobOpener:
    """Opens jobs on one device."""

    def __init__(
        self,
        device: Device,
        pages: PageManager,
        adapters: ServedAdapters,
        log: CommandLog,
        trainable_models: Mapping[str, str],
    ) -> None:
        """Make an opener. trainable_models: as in `EngineConfig`."""
        self._device, self._pages, self._adapters, self._log = device, pages, adapters, log
        self._trainable_models = trainable_models

    def open(
        self,
        job_id: str,
        name: str,
        config: TuningConfig,
        examples: Sequence[Example],
        validation: Sequence[Example],
        *,
        adapter: PeftFields | Mapping[str, Any] | str | None,
        checkpoint: str | Path | None,
        tenant: str,
        model: str,
        shard: Shard | None,
        others: Mapping[str, Job],
    ) -> Job:
        """Return a new job. Arguments and errors are those of `TokenEngine.submit_examples`;
        others: existing jobs.
        """
        if job_id in others:
            raise JobError(f"there is a job {job_id!r} already")
        if not examples:
            raise JobError("a job needs examples")
        check_adapter_name(name, others.values(), self._adapters.versions)
        # Only a fresh adapter of the served model surely has its vocabulary; that of others is
        # reported when the trainer opens.
        is_checked = not model and checkpoint is None and not isinstance(adapter, str)
        if is_checked:
            check_examples([*examples, *validation], self._device.info)
        num_tokens = sum(len(example.tokens) for example in examples)
        path = trainable_model_path(model, self._trainable_models)
        if checkpoint is None and adapter is None:
            raise JobError("a job needs an adapter to begin with, or a checkpoint to resume from")
        # A sequence's rows see half of it on average: the sum of length**2 / 2 over all tokens.
        num_pairs = sum(length**2 for each in examples for length in each.lengths)
        version = None
        if checkpoint is None:
            version = _version_of(adapter, model, self._adapters.versions)
        trainer = OpenTrainer(
            job=job_id,
            config=config,
            mean_context_len=num_pairs / num_tokens / 2,
            adapter=None if adapter is None or isinstance(adapter, str) else fields_of(adapter),
            version=version,
            checkpoint=None if checkpoint is None else str(checkpoint),
            model=path,
            shard=shard,
        )
        position = None if checkpoint is None else read_position(checkpoint)
        # The trainer copies the version's values, so they must be on the device.
        if trainer.version is not None:
            self._adapters.bring_back(trainer.version)
        questions = _questions(validation, config, model)
        try:
            costs = self._log.execute(trainer)
            assert isinstance(costs, TrainerOpened)
            info = costs.other or self._device.info
            if not is_checked:
                check_examples([*examples, *validation], info, vocab_size=costs.vocab_size)
            examples = with_virtual_tokens(examples, costs.num_virtual_tokens, info.max_positions)
            validation = with_virtual_tokens(
                validation, costs.num_virtual_tokens, info.max_positions
            )
            job = Job(
                id=job_id,
                name=name,
                config=with_pack_size(config, costs, self._pages, [*examples, *validation], model),
                examples=examples,
                validation=validation,
                costs=costs,
                tenant=tenant,
                model=model,
                questions=questions,
                shard=shard,
            )
            if position is not None:
                job.resume(position)
        except BaseException:
            # Interruptions included: the device may hold a trainer for a job that will not exist.
            self._log.send(DropTrainer(job_id))
            with suppress(DeviceGoneError):
                self._log.flush()
            raise
        return job


def fields_of(adapter: Any) -> dict[str, Any]:
    """Return an adapter's configuration in PEFT's format, from that format, coserve's configuration
    or PEFT's.

    Raises:
        AdapterError: it is no adapter's configuration.
    """
    if isinstance(adapter, Mapping):
        return dict(adapter)
    if hasattr(adapter, "to_peft"):
        fields: dict[str, Any] = adapter.to_peft()
        return fields
    if hasattr(adapter, "peft_type") and hasattr(adapter, "to_dict"):
        # PEFT's fields include sets and enumerations.
        plain: dict[str, Any] = json.loads(json.dumps(adapter.to_dict(), default=list))
        return plain
    raise AdapterError(
        f"an adapter is a configuration, the fields of PEFT's, or a name, not {shown(adapter)}"
    )


def _version_of(adapter: Any, model: str, versions: AdapterVersions) -> str | None:
    """Return the key of the version that a job of this model continues; None if its adapter is a
    fresh one.
    """
    if not isinstance(adapter, str):
        return None
    version = versions.resolve(adapter)
    if version.model != model:
        raise JobError(
            f"adapter {version.label} is of {_named(version.model)}, the job of {_named(model)}: "
            "continue it on its own model"
        )
    return version.key


def _questions(
    validation: Sequence[Example], config: TuningConfig, model: str
) -> Sequence[Question]:
    if model and config.evaluation.asks:
        raise JobError(
            f"{config.evaluation.metric} needs answers of model {model!r}, which is trained here, "
            f"not served"
        )
    try:
        return questions_of(validation, config.evaluation) if validation else ()
    except DataError as error:
        raise JobError(f"the validation set: {error}") from None


def trainable_model_path(model: str, trainable_models: Mapping[str, str]) -> str:
    """Return the path of a model that jobs may train, by its name; "" for "", the one that serves.
    JobError if there is none.
    """
    if model and model not in trainable_models:
        names = ", ".join(map(repr, trainable_models)) or "none"
        raise JobError(
            f"model {model!r} is not served here, nor one of those that can be trained beside it: "
            f"{names}"
        )
    return trainable_models[model] if model else ""


def _window_pages(other: OtherModel, pages: PageManager, model: str) -> int:
    """Return the fewest pages that the weights of a model need.

    Raises:
        JobError: the window of weights may not have that many.
    """
    least, most_bytes = pages.window_need(other).min_pages, pages.max_window_bytes
    if least * pages.pool.page_bytes > most_bytes:
        raise JobError(
            f"two parts of model {model!r} side by side need {least * pages.pool.page_bytes} "
            f"bytes; the window of "
            f"weights may have {most_bytes}: give it, or the engine, more memory"
        )
    return least


def _named(model: str) -> str:
    return f"model {model!r}" if model else "the model that serves"


def with_pack_size(
    config: TuningConfig,
    costs: TrainerOpened,
    pages: PageManager,
    examples: Sequence[Example],
    model: str = "",
) -> TuningConfig:
    """Return the configuration with packs that the pool can hold.

    Raises:
        JobError: the pool cannot hold them, or not beside the weights or moments that the job needs
            there.
    """
    num_all = pages.pool.num_pages
    longest = max(len(example.tokens) for example in packed_apart(examples, config))
    if costs.other is not None:
        num_all -= _window_pages(costs.other, pages, model)
    if costs.moments_need_pages:
        num_all -= pages.num_pages(costs.optimizer_bytes)
        if num_all <= 0:
            raise JobError(
                f"its optimizer's moments take {costs.optimizer_bytes:,} bytes, more than the page "
                f"pool has, and the "
                "device has no room for them beside it: lower the adapter's rank, or train fewer "
                "layers"
            )

    def num_pages(num_rows: int) -> int:
        return sum(pages.num_pages(group_bytes(tensors, num_rows)) for tensors in costs.training)

    # By default a pack takes half of the pool at most, so that requests keep the rest; it always
    # holds the longest example.
    if config.max_pack_tokens is None:
        rows = config.pack_tokens
        while rows > longest and num_pages(rows) > num_all // 2:
            rows //= 2
        config = replace(config, max_pack_tokens=max(rows, longest))
    largest = max(config.pack_tokens, longest)
    if (needed := num_pages(largest)) > num_all:
        raise JobError(
            f"a pack of {largest} tokens needs {needed} pages; there are {max(0, num_all)}: "
            "lower max_pack_tokens or max_sequence_length, or give the engine more memory"
        )
    return config
