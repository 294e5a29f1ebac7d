"""What clients may ask of jobs, and what an engine reports of them: the room's front.

All changes go through the one task of a `JobMailbox` to the `JobDriver`, which drives each job from
its actual to its desired state. That task waits for the store alone. A client that asks for a
change waits, besides, for what the engine answers about that job, and so for its checkpoints;
nothing that is asked of another job does.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path

from coserve.engine.commands import AdapterRef
from coserve.engine.jobs.events import JobEvent
from coserve.errors import JobError, StoreError
from coserve.jobs.datasets.validation import FileReader, Validated
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.folders import Folders
from coserve.jobs.lifecycle.catalogue import JobAdapters
from coserve.jobs.lifecycle.driver import JobDriver
from coserve.jobs.lifecycle.events import DesiredState, EngineLost, EngineReady, EngineReported
from coserve.jobs.lifecycle.job_writer import JobWriter
from coserve.jobs.lifecycle.live_jobs import Waiter
from coserve.jobs.lifecycle.report_writer import JobReportWriter
from coserve.jobs.lifecycle.slots import TenantLimit, TrainingSlots
from coserve.jobs.messages import Checkpointed, JobEngine
from coserve.jobs.models import JobModels
from coserve.jobs.names import model_name
from coserve.jobs.records import JobRecord, new_id
from coserve.jobs.settings import JobSettings
from coserve.jobs.sql.store import Store


class JobManager:
    """Belongs to one event loop: `start` and `close` on it, and everything else between those."""

    def __init__(
        self,
        *,
        store: Store,
        files: Files,
        directory: Path,
        engine: JobEngine,
        models: JobModels,
        clock: Callable[[], float] = time.monotonic,
        max_running: int | None = None,
        max_running_of: TenantLimit = lambda tenant: None,
        timeout_s: float = inf,
    ) -> None:
        """directory: where jobs keep checkpoints. max_running, max_running_of: jobs that train at
        once, of all and of a tenant. timeout_s: how long a job may run before it fails.
        """
        self.store, self.files, self.models = store, files, models
        folders = Folders(directory, files.shared)
        self._writer = JobWriter(store, files, folders)
        self.adapters = JobAdapters(store, models.served.name, folders)
        self._reader = FileReader(files, folders, models, self._files_read)
        self._driver = JobDriver(
            writer=self._writer,
            report_writer=JobReportWriter(store, folders),
            adapters=self.adapters,
            reader=self._reader,
            engine=engine,
            models=models,
            clock=clock,
            slots=TrainingSlots(max_running, max_running_of),
            timeout_s=timeout_s,
        )
        self.mailbox = self._driver.mailbox
        self._clock = clock

    # -- life -----------------------------------------------------------------------

    async def start(self) -> None:
        """Remove what a process that ended anywhere left half done, and begin."""
        await self._driver.start(await asyncio.to_thread(self._writer.tidy))

    async def close(self) -> None:
        """Write down what has been reported, and end. Jobs resume at the next start."""
        self._reader.stop_all()
        await self._driver.close()
        await self._reader.wait()

    async def settled(self) -> None:
        """Wait until files have been read, and all that was asked for, answered and reported so far
        has been done.
        """
        await self._reader.wait()

        async def nothing() -> None:
            return None

        await self.mailbox.call(nothing)
        while commands := self._driver.actions.open_commands:
            await asyncio.wait(commands)
            await self.mailbox.call(nothing)

    # -- what the engine says (on the event loop; returns at once) ------------------

    def engine_ready(self) -> None:
        """A fresh engine takes commands."""
        self._driver.put(EngineReady())

    def engine_gone(
        self, under_way: Collection[str] | None = None, jobs: Collection[str] | None = None
    ) -> None:
        """An engine has died; see `EngineLost`."""
        self._driver.put(EngineLost(now_s=self._clock(), under_way=under_way, jobs=jobs))

    def engine_reported(
        self, events: Sequence[JobEvent], checkpoints: Sequence[Checkpointed]
    ) -> None:
        """What it reports, in the order in which it was reported."""
        if events or checkpoints:
            self._driver.put(EngineReported(events=events, checkpoints=checkpoints))

    # -- what clients ask for -------------------------------------------------------

    async def create(
        self,
        tenant: str,
        *,
        model: str,
        base: str,
        training_file: str,
        validation_file: str | None,
        suffix: str | None,
        metadata: dict[str, str] | None,
        settings: JobSettings,
        start: AdapterRef | None,
        max_jobs: int | None = None,
    ) -> JobRecord:
        """A new job. model: as it was asked for. base: the model underneath. start: the adapter
        that it trains further. max_jobs: of the tenant, that have not ended.

        Raises:
            JobError: names the field. LimitError: the tenant has as many jobs as it may.
        """
        if settings.live and base != self.models.served.name:
            raise JobError(
                f"{base} is trained here and not served: live must be false", param="coserve.live"
            )
        if settings.evaluation.asks and base != self.models.served.name:
            asked = settings.evaluation.metric
            raise JobError(
                f"{base} is trained here and not served: it answers no questions, as the metric "
                f"{asked} would have it",
                param="coserve.evaluation.metric",
            )
        if start is not None and start.directory is None:
            raise JobError(
                f"{model} is still being trained: wait for it, or name a checkpoint", param="model"
            )
        record = JobRecord(
            id=new_id("ftjob-"),
            tenant=tenant,
            created_at=int(time.time()),
            model=model,
            base=base,
            name=model_name(base, tenant, suffix),
            status="validating_files",
            training_file=training_file,
            validation_file=validation_file,
            suffix=suffix,
            seed=settings.seed,
            metadata=metadata,
            settings=settings.to_data(),
            start=None if start is None else {"name": start.name, "directory": start.directory},
        )
        return await self.mailbox.call(lambda: self._create(record, max_jobs))

    async def cancel(self, tenant: str, id: str) -> JobRecord:
        """End a job; JobError if there is none, or it has ended."""
        return await self._change(tenant, id, "end")

    async def pause(self, tenant: str, id: str) -> JobRecord:
        """Let a job rest; JobError if there is none, or it has ended or is paused."""
        return await self._change(tenant, id, "rest")

    async def resume(self, tenant: str, id: str) -> JobRecord:
        """Resume a paused job; JobError if it is not paused."""
        return await self._change(tenant, id, "run")

    async def delete_adapter(self, tenant: str, name: str) -> tuple[str, ...]:
        """Forget an adapter, and remove what is on disk of it; with a model go all checkpoints of
        its job.

        Returns the names that are gone: none if it was not there.

        Raises:
            JobError: a job that has not ended still needs it.
        """
        return await self.mailbox.call(lambda: self._delete_adapter(tenant, name))

    def queue_position(self, job: JobRecord) -> int | None:
        """Return the position of a job that waits for a slot to train in: 1 is the next."""
        return self._driver.jobs.slot_position(job.id)

    def share_validated(self, job: JobRecord) -> float | None:
        """Of the bytes of its files, while they are read."""
        return self._reader.share_read(job.id)

    def estimated_finish(self, job: JobRecord) -> int | None:
        """Unix time; None unless it is running and has made a step since that began."""
        state = self._driver.jobs.get(job.id)
        if job.status != "running" or state is None or state.meter is None:
            return None
        seconds = state.meter.seconds_left(job.num_steps - job.num_steps_done, self._clock())
        return None if seconds is None else int(time.time() + seconds)

    # -- outside of the mailbox ---------------------------------------------------------

    async def _change(self, tenant: str, id: str, desired: DesiredState) -> JobRecord:
        """Ask for it, and wait until it is so."""
        while (asked := await self.mailbox.call(lambda: self._ask(tenant, id, desired))) is None:
            if (earlier := self._driver.jobs.waiter(id)) is not None:
                await asyncio.wait([earlier])
        # A client that gives up does not take back what it asked for.
        job = await asyncio.shield(asked)
        if not (
            desired == "end" and job.status == "cancelled"
        ):  # then it may have ended while the engine was told
            check_not_over(job, unless_resumed=desired == "run")
        return job

    # -- in the mailbox's task --------------------------------------------------------------------

    async def _create(self, record: JobRecord, max_jobs: int | None) -> JobRecord:
        try:
            await asyncio.to_thread(self._writer.add, record, max_jobs)
        except (StoreError, OSError) as error:
            self._driver.check_later(record.id, error)
            raise
        self._driver.add(record)
        return await self._driver.settle_job(record.id) or record

    async def _files_read(self, id: str, found: Validated | JobError) -> None:
        await self.mailbox.call(lambda: self._driver.read(id, found))

    async def _ask(self, tenant: str, id: str, desired: DesiredState) -> Waiter | None:
        """None: something else has been asked of the job, and comes first."""
        job = await asyncio.to_thread(self._writer.find, tenant, id)
        if job is None:
            raise JobError(f"There is no fine-tuning job {id!r}")
        if self._driver.jobs.waiter(id) is not None:
            return None
        check_not_over(job)
        if desired == "rest" and job.status == "paused":
            raise JobError(f"Job {id} is paused already")
        if desired == "run" and job.status != "paused":
            raise JobError(f"Job {id} is not paused: it is {job.status}")
        if desired == "run" and not job.validated and job.base not in self.models:
            raise JobError(
                f"Job {id} is of the model {job.base}, which is not here now", param="model"
            )
        return await self._driver.ask(id, desired)

    async def _delete_adapter(self, tenant: str, name: str) -> tuple[str, ...]:
        gone = await asyncio.to_thread(self.adapters.delete, tenant, name)
        self.adapters.changed()
        return gone


def check_not_over(job: JobRecord, *, unless_resumed: bool = False) -> None:
    """JobError if nothing can be changed any more."""
    if job.is_terminal and not unless_resumed:
        raise JobError(f"Job {job.id} has already completed: its status is {job.status}")
