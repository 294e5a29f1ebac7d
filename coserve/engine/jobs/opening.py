"""How a job is opened: what was asked is checked, and the device makes its trainer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coserve.devices.base import Device
from coserve.devices.job_messages import DropTrainer, TrainerOpened
from coserve.engine.checks import check_adapter_name, check_examples, with_virtual_tokens
from coserve.engine.command_log import CommandLog
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.start import JobStart, PeftFields, make_start, with_pack_size
from coserve.engine.page_broker import PageBroker
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import DataError, DeviceGoneError, JobError
from coserve.tuning.config import TuningConfig
from coserve.tuning.evaluation import Question, questions_of
from coserve.tuning.examples import Example
from coserve.tuning.shard import Shard


class JobOpener:
    """Opens jobs on one device."""

    def __init__(
        self,
        device: Device,
        pages: PageBroker,
        adapters: ServedAdapters,
        log: CommandLog,
        trainable_models: Mapping[str, str],
    ) -> None:
        """trainable_models: see `EngineConfig`."""
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
        """A job that is to run; see `EngineCore.submit_examples`. others: jobs that there are."""
        if job_id in others:
            raise JobError(f"there is a job {job_id!r} already")
        if not examples:
            raise JobError("a job needs examples")
        check_adapter_name(name, others.values(), self._adapters.versions)
        # Only a fresh adapter of the device's model is sure to have its vocabulary: others are known when opened.
        is_checked = not model and checkpoint is None and not isinstance(adapter, str)
        if is_checked:
            check_examples([*examples, *validation], self._device.info)
        start = make_start(
            job_id,
            config,
            examples,
            self._adapters.versions,
            adapter=adapter,
            checkpoint=checkpoint,
            model=model,
            trainable_models=self._trainable_models,
            shard=shard,
        )
        if start.trainer.version is not None:
            self._adapters.bring_back(start.trainer.version)
        questions = _questions(validation, config, model)
        try:
            costs = self._log.execute(start.trainer)
            assert isinstance(costs, TrainerOpened)
            if not is_checked:
                info = costs.other or self._device.info
                check_examples([*examples, *validation], info, vocab_size=costs.vocab_size)
            return self._job(start, name, config, examples, validation, costs=costs, questions=questions, tenant=tenant)
        except BaseException:
            self._log.send(DropTrainer(job_id))
            with suppress(DeviceGoneError):
                self._log.flush()
            raise

    def _job(
        self,
        start: JobStart,
        name: str,
        config: TuningConfig,
        examples: Sequence[Example],
        validation: Sequence[Example],
        *,
        costs: TrainerOpened,
        questions: Sequence[Question],
        tenant: str,
    ) -> Job:
        """Return the job of a trainer that the device has opened, with examples that were checked."""
        positions = (costs.other or self._device.info).max_positions
        examples = with_virtual_tokens(examples, costs.num_virtual_tokens, positions)
        validation = with_virtual_tokens(validation, costs.num_virtual_tokens, positions)
        job = Job(
            id=start.trainer.job,
            name=name,
            config=with_pack_size(config, costs, self._pages, [*examples, *validation], start.model),
            examples=examples,
            validation=validation,
            costs=costs,
            tenant=tenant,
            model=start.model,
            questions=questions,
            shard=start.shard,
        )
        if start.position is not None:
            job.resume(start.position)
        return job


def _questions(validation: Sequence[Example], config: TuningConfig, model: str) -> Sequence[Question]:
    if model and config.evaluation.asks:
        raise JobError(
            f"{config.evaluation.metric} needs answers of model {model!r}, which is trained here, not served"
        )
    try:
        return questions_of(validation, config.evaluation) if validation else ()
    except DataError as error:
        raise JobError(f"the validation set: {error}") from None
