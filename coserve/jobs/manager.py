"""Manager of jobs, the front of this package: requests of clients, and reports of engines.

All changes go through the one task of a `JobMailbox` to the `JobDriver`, which drives each job from
its actual to its desired state. That task waits only for the store. A client that requests a change
also waits for the engine's answer about that job, and so for its checkpoints; requests about other
jobs do not wait for that.
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
    """The manager of all jobs of a server. Belongs to one event loop; all calls come between
    `start` and `close`.
    """

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
        """Connect jobs with the store, their files and the engine.

        Args:
            store: Store of records.
            files: Uploaded files.
            directory: Directory in which jobs keep checkpoints.
            engine: Engine that runs the jobs.
            models: Models that jobs may train.
            clock: Returns seconds; must not jump.
            max_running: Number of jobs that may train at once (None: no limit).
            max_running_of: Returns the same limit for a tenant.
            timeout_s: Longest time that a job may run before it fails.
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
        """Remove what an earlier process left half done, and start."""
        await self._driver.start(await asyncio.to_thread(self._writer.tidy))

    async def close(self) -> None:
        """Record what has been reported, and stop. Jobs resume at the next start."""
        self._reader.stop_all()
        await self._driver.close()
        # A reading ends with a call of the mailbox, which by now refuses calls.
        await self._reader.wait()

    async def settled(self) -> None:
        """Wait until files have been read, and everything requested, answered and reported so far
        is handled.
        """
        await self._reader.wait()

        async def nothing() -> None:
            return None

        await self.mailbox.call(nothing)
        # An answer may lead to further commands.
        while commands := self._driver.actions.open_commands:
            await asyncio.wait(commands)
            await self.mailbox.call(nothing)

    # -- reports of the engine (on the event loop; return at once) ------------------

    def engine_ready(self) -> None:
        """Note that a fresh engine accepts commands."""
        self._driver.put(EngineReady())

    def engine_gone(
        self, under_way: Collection[str] | None = None, jobs: Collection[str] | None = None
    ) -> None:
        """Note that an engine has died; see `EngineLost`."""
        self._driver.put(EngineLost(now_s=self._clock(), under_way=under_way, jobs=jobs))

    def engine_reported(
        self, events: Sequence[JobEvent], checkpoints: Sequence[Checkpointed]
    ) -> None:
        """Queue an engine's report, after all earlier ones."""
        if events or checkpoints:
            self._driver.put(EngineReported(events=events, checkpoints=checkpoints))

    # -- requests of clients --------------------------------------------------------

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
        """Create a job.

        Args:
            tenant: Owner of the job.
            model: Model as the client named it.
            base: Base model.
            training_file: Id of the training file.
            validation_file: Id of the validation file, if any.
            suffix: Part of the new model's name, if any.
            metadata: Labels of the job, if any.
            settings: Settings of the job.
            start: Adapter that the job trains further, if any.
            max_jobs: Limit of the tenant's unfinished jobs (None: no limit).

        Raises:
            JobError: The message names the field.
            LimitError: The tenant has max_jobs unfinished jobs.
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
        """Cancel a job.

        Raises:
            JobError: There is no such job, or it has ended.
        """
        return await self._change(tenant, id, "end")

    async def pause(self, tenant: str, id: str) -> JobRecord:
        """Pause a job.

        Raises:
            JobError: There is no such job, or it has ended or is paused.
        """
        return await self._change(tenant, id, "rest")

    async def resume(self, tenant: str, id: str) -> JobRecord:
        """Resume a paused job.

        Raises:
            JobError: The job is not paused.
        """
        return await self._change(tenant, id, "run")

    async def delete_adapter(self, tenant: str, name: str) -> tuple[str, ...]:
        """Delete an adapter from the store and from disk; a model goes with all checkpoints of its
        job.

        Returns:
            The names that were deleted; none if the adapter does not exist.

        Raises:
            JobError: A job that has not ended needs it.
        """
        return await self.mailbox.call(lambda: self._delete_adapter(tenant, name))

    def queue_position(self, job: JobRecord) -> int | None:
        """Return the position of a job that waits for a training slot: 1 is the next."""
        return self._driver.jobs.slot_position(job.id)

    def share_validated(self, job: JobRecord) -> float | None:
        """Return the share of the bytes of a job's files that was read; None if they are not being
        read.
        """
        return self._reader.share_read(job.id)

    def estimated_finish(self, job: JobRecord) -> int | None:
        """Return the estimated end in Unix time; None unless the job is running and has made a step
        since it started to.
        """
        state = self._driver.jobs.get(job.id)
        if job.status != "running" or state is None or state.meter is None:
            return None
        seconds = state.meter.seconds_left(job.num_steps - job.num_steps_done, self._clock())
        return None if seconds is None else int(time.time() + seconds)

    # -- outside of the mailbox ---------------------------------------------------------

    async def _change(self, tenant: str, id: str, desired: DesiredState) -> JobRecord:
        """Request a state of a job, and wait until it is reached."""
        # One request for a job at a time: wait for an earlier one, then try again.
        while (asked := await self.mailbox.call(lambda: self._ask(tenant, id, desired))) is None:
            if (earlier := self._driver.jobs.waiter(id)) is not None:
                await asyncio.wait([earlier])
        # A client that disconnects does not withdraw its request.
        job = await asyncio.shield(asked)
        # Any other status means that the job ended by itself meanwhile.
        if not (desired == "end" and job.status == "cancelled"):
            check_not_over(job, unless_resumed=desired == "run")
        return job

    # -- in the mailbox's task --------------------------------------------------------------------

    async def _create(self, record: JobRecord, max_jobs: int | None) -> JobRecord:
        try:
            await asyncio.to_thread(self._writer.add, record, max_jobs)
        except (StoreError, OSError) as error:
            # The store may have the job all the same, which then has to be run.
            self._driver.check_later(record.id, error)
            raise
        self._driver.add(record)
        return await self._driver.settle_job(record.id) or record

    async def _files_read(self, id: str, result: Validated | JobError) -> None:
        await self.mailbox.call(lambda: self._driver.read(id, result))

    async def _ask(self, tenant: str, id: str, desired: DesiredState) -> Waiter | None:
        """Return the future of a request; None if another request is open for the job and comes
        first.
        """
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
    """Raise JobError if a job has ended, so that nothing can be changed any more."""
    if job.is_terminal and not unless_resumed:
        raise JobError(f"Job {job.id} has already completed: its status is {job.status}")
