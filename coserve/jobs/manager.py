"""The lifecycle of jobs: validating_files, queued, running (or paused), and succeeded, failed or cancelled.

One task does everything that changes a job, one thing after the other, so that no two changes ever meet: what the
engine reports, the engine's deaths and returns, what clients ask for, and files that have been validated. It waits for
the store and for the engine, never the event loop.

What the store says is what is true. A job is `running` if the engine that lives now has taken it. When an engine is
ready, and when the server starts, every unfinished job is taken up from its newest checkpoint; what its events say
beyond that is forgotten, for it will happen again. So every step appears once, and every example is used once an epoch.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from coserve.engine.job import JobEvent
from coserve.errors import CoserveError, EngineGoneError, JobError, StoreError
from coserve.jobs.estimate import ProgressMeter
from coserve.jobs.files import RESULTS, Files, remove_tree
from coserve.jobs.folders import Folders, prune_records, resume_point
from coserve.jobs.messages import AdapterRef, Checkpointed, JobEngine, JobStart
from coserve.jobs.names import model_name
from coserve.jobs.recording import Recorder, Report, adapter_of, job_event
from coserve.jobs.records import AdapterRecord, CheckpointRecord, FileRecord, JobRecord, JobStatus, new_id
from coserve.jobs.results import FILENAME, results_csv
from coserve.jobs.settings import JobSettings
from coserve.jobs.store import Store
from coserve.jobs.validation import BaseModel, Validated, validate

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_STORE_WAIT_S = 1.0
# Engines that died in a row without a step of a job that they had: then it is what kills them, as far as one can know.
_MOST_DEATHS = 10


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Something to do, and who waits for it."""

    do: Callable[[], Awaitable[Any]]
    result: "asyncio.Future[Any]"


class JobManager:
    """Belongs to one event loop: `start` and `close` on it, and everything else between those."""

    def __init__(
        self,
        *,
        store: Store,
        files: Files,
        directory: Path,
        engine: JobEngine,
        model: BaseModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """directory: where jobs keep checkpoints."""
        self.store, self.files, self.model = store, files, model
        self._folders = Folders(directory)
        self._recorder = Recorder(store, self._folders)
        self._engine, self._clock = engine, clock
        self._engine_is_up = False
        self._inbox: deque[Report | Literal["ready", "gone"]] = deque()
        self._calls: deque[_Call] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        # Jobs that the engine has taken, and not ended.
        self._taken: set[str] = set()
        self._ended: set[str] = set()  # succeeded in the engine, but the last checkpoint is not there yet
        self._deaths: dict[str, int] = {}
        self._meters: dict[str, ProgressMeter] = {}
        self._known: dict[tuple[str, str], AdapterRecord] = {}  # adapters that were asked for; the store is right
        self._live: dict[tuple[str, str], AdapterRecord] = {}
        self._validations: dict[str, asyncio.Task[None]] = {}
        self._unwanted: set[str] = set()  # jobs whose files nobody needs to read on
        self._one_validation = asyncio.Semaphore(1)

    # -- life -----------------------------------------------------------------------

    async def start(self) -> None:
        """Tidy up what a process that ended anywhere left behind, and begin."""
        jobs = await asyncio.to_thread(self._tidy)
        for job in jobs:
            if job.status == "validating_files" and job.base == self.model.name:
                self._validate(job)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write down what has been reported, and end. Jobs go on at the next start."""
        self._closing = True
        self._unwanted |= self._validations.keys()
        self._news.set()
        if self._task is not None:
            await self._task
        await asyncio.gather(*self._validations.values())

    def _tidy(self) -> tuple[JobRecord, ...]:
        self.files.tidy()
        with self.store.write() as transaction:
            jobs = transaction.unfinished_jobs()
            for job in jobs:
                if job.status == "running":
                    transaction.change_job(job.id, status="queued")
            known = transaction.job_ids()
        self._folders.tidy(known)
        for id in self._folders.unswept():
            with self.store.read() as transaction:
                found, kept = transaction.any_job(id), transaction.all_checkpoints(id)
            if found is not None and found.is_terminal:
                self._folders.sweep(id, kept, is_terminal=True)
        return jobs

    # -- what the engine says (on the event loop; returns at once) ----------------------

    def engine_ready(self) -> None:
        """A fresh engine takes commands."""
        self._engine_is_up = True
        self._put("ready")

    def engine_gone(self) -> None:
        """It has died."""
        self._engine_is_up = False
        self._put("gone")

    def engine_reported(self, events: Sequence[JobEvent], checkpoints: Sequence[Checkpointed]) -> None:
        """What it reports, in the order in which it was reported."""
        if events or checkpoints:
            self._put(Report(events=events, checkpoints=checkpoints))

    def _put(self, item: Report | Literal["ready", "gone"]) -> None:
        self._inbox.append(item)
        self._news.set()

    # -- what clients ask for -------------------------------------------------------------

    async def create(
        self,
        tenant: str,
        *,
        model: str,
        training_file: str,
        validation_file: str | None,
        suffix: str | None,
        metadata: dict[str, str] | None,
        settings: JobSettings,
        start: AdapterRef | None,
    ) -> JobRecord:
        """A new job. model: as it was asked for. start: the adapter that it goes on training.

        Raises:
            JobError: names the field.
        """
        if start is not None and start.directory is None:
            raise JobError(f"{model} is still being trained: wait for it, or name a checkpoint", param="model")
        id = new_id("ftjob-")
        record = JobRecord(
            id=id,
            tenant=tenant,
            created_at=int(time.time()),
            model=model,
            base=self.model.name,
            name=model_name(self.model.name, tenant, suffix),
            status="validating_files",
            training_file=training_file,
            validation_file=validation_file,
            suffix=suffix,
            seed=settings.seed,
            metadata=metadata,
            settings=settings.to_data(),
            start=None if start is None else {"name": start.name, "directory": start.directory},
        )
        return await self._call(lambda: self._create(record))

    async def cancel(self, tenant: str, id: str) -> JobRecord:
        """End a job; JobError if there is none, or it is over."""
        return await self._call(lambda: self._cancel(tenant, id))

    async def pause(self, tenant: str, id: str) -> JobRecord:
        """Let a job rest; JobError if there is none, or it is over or paused."""
        return await self._call(lambda: self._pause(tenant, id))

    async def resume(self, tenant: str, id: str) -> JobRecord:
        """The inverse; JobError if it is not paused."""
        return await self._call(lambda: self._resume(tenant, id))

    async def delete_adapter(self, tenant: str, name: str) -> bool:
        """Forget an adapter, and remove what is on disk of it; returns whether it was there.

        Raises:
            JobError: a job that is not over still needs it.
        """
        return await self._call(lambda: self._delete(tenant, name))

    def adapters(self, tenant: str) -> list[AdapterRecord]:
        """Those of this model that a tenant's jobs have made, and those of live jobs."""
        with self.store.read() as transaction:
            found = transaction.adapters(tenant, self.model.name)
        return [*found, *(each for (owner, _), each in list(self._live.items()) if owner == tenant)]

    def adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        """The one of a name. A request's: the store is asked once."""
        known = self._known  # another, if something changes while the store is asked
        if (found := known.get((tenant, name)) or self._live.get((tenant, name))) is not None:
            return found
        with self.store.read() as transaction:
            found = transaction.adapter(tenant, name)
        if found is None or found.base != self.model.name:
            return None
        known[tenant, name] = found
        return found

    def estimated_finish(self, job: JobRecord) -> int | None:
        """Unix time; None unless it is running and has made a step since that began."""
        meter = self._meters.get(job.id)
        if job.status != "running" or meter is None:
            return None
        seconds = meter.seconds_left(job.num_steps - job.num_steps_done, self._clock())
        return None if seconds is None else int(time.time() + seconds)

    # -- the task -----------------------------------------------------------------------

    async def _call(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Have something done when it is its turn."""
        if self._closing or self._task is None or self._task.done():
            raise EngineGoneError("the server is shutting down")
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(do=do, result=future))
        self._news.set()
        return await future

    async def _run(self) -> None:
        while not self._closing:
            await self._news.wait()
            self._news.clear()
            await self._settle()
            while self._calls:
                await self._serve(self._calls.popleft())
                await self._settle()
        await self._settle()
        for call in self._calls:
            if not call.result.done():  # who waited may have given up
                call.result.set_exception(EngineGoneError("the server is shutting down"))

    async def _serve(self, call: _Call) -> None:
        try:
            result = await call.do()
        except Exception as error:
            if not call.result.done():
                call.result.set_exception(error)
        else:
            if not call.result.done():
                call.result.set_result(result)

    async def _settle(self) -> None:
        """Take in all that the engine has said so far."""
        while self._inbox:
            batch: list[Report] = []
            item = self._inbox[0]
            while self._inbox and isinstance(self._inbox[0], Report):
                batch.append(self._inbox[0])
                self._inbox.popleft()
            try:
                if batch:
                    await self._record(batch)
                else:
                    self._inbox.popleft()
                    await (self._take_up_all() if item == "ready" else self._lose_all())
            except Exception as error:  # the next job's fate must not hang on this one's
                _log.exception("a job's report could not be taken in: %s", error)

    async def _in_store(self, do: Callable[..., _Result], *arguments: Any) -> _Result:
        """Do something that must not get lost: as often as it takes, if the database is away or the disk is full."""
        while True:
            try:
                return await asyncio.to_thread(do, *arguments)
            except (StoreError, OSError) as error:
                if self._closing:
                    raise
                _log.error("%s; it is tried again", error)
                await asyncio.sleep(_STORE_WAIT_S)

    # -- what the engine said ---------------------------------------------------------------

    async def _record(self, reports: list[Report]) -> None:
        outcome = await self._in_store(self._recorder.record, reports, self._is_here)
        for job, num_steps in outcome.num_steps.items():
            self._deaths.pop(job, None)
            for _ in range(num_steps):
                if (meter := self._meters.get(job)) is not None:
                    meter.step_done(self._clock())
        for id in outcome.published:
            await self._note_live(id)
        if outcome.num_checkpoints:
            self._known = {}
        self._taken -= outcome.left
        self._ended |= {id for id, error in outcome.ended.items() if error is None}
        for id, error in outcome.ended.items():
            if error is not None:
                await self._end(id, "failed", {"code": "training_failed", "message": error, "param": None})
        for id in list(self._ended):
            await self._succeed_if_complete(id)

    def _is_here(self, id: str) -> bool:
        """Whether a job is the living engine's to report on."""
        return id in self._taken or id in self._ended

    async def _note_live(self, id: str) -> None:
        job = await asyncio.to_thread(self._job, id)
        if job.settings["live"] and not job.is_terminal:
            self._live.setdefault((job.tenant, job.name), adapter_of(job, job.name, None))

    async def _succeed_if_complete(self, id: str) -> None:
        """A job has succeeded when its last checkpoint is there."""
        with_last = await self._in_store(self._has_last_checkpoint, id)
        if with_last:
            self._ended.discard(id)
            await self._end(id, "succeeded")

    def _has_last_checkpoint(self, id: str) -> bool:
        job = self._job(id)
        with self.store.read() as transaction:
            return any(each.listed and each.step == job.num_steps for each in transaction.all_checkpoints(id))

    async def _lose_all(self) -> None:
        """The engine is gone, and every job with it."""
        lost = set(self._taken | self._ended)
        self._taken.clear()
        self._ended.clear()
        self._meters.clear()
        self._live.clear()
        for id in await self._in_store(self._requeue, lost):
            self._deaths[id] = self._deaths.get(id, 0) + 1
            if self._deaths[id] == _MOST_DEATHS:
                message = f"the engine died {_MOST_DEATHS} times in a row without a step of this job being done"
                await self._end(id, "failed", {"code": "engine_died", "message": message, "param": None})

    def _requeue(self, lost: set[str]) -> list[str]:
        with self.store.write() as transaction:
            jobs = [job for job in transaction.unfinished_jobs() if job.id in lost and job.status != "paused"]
            for job in jobs:
                transaction.change_job(job.id, status="queued")
        return [job.id for job in jobs]

    # -- to the engine ------------------------------------------------------------------------

    @property
    def _may_start(self) -> bool:
        """Whether there is an engine, and all of its fate so far has been taken in."""
        return self._engine_is_up and not any(item in ("ready", "gone") for item in self._inbox)

    async def _take_up_all(self) -> None:
        jobs = await self._in_store(self._unfinished)
        for job in jobs:
            if job.status in ("queued", "running") and job.id not in self._taken:
                await self._take_up(job)

    async def _take_up(self, job: JobRecord) -> None:
        """Start a queued job, or go on with it. If there is no engine, it waits for one."""
        if job.base != self.model.name or not self._may_start:
            return
        checkpoint, is_done = await self._in_store(self._roll_back, job)
        self._known = {}
        if is_done:
            await self._end(job.id, "succeeded")
            return
        if not self._may_start:
            return
        self._taken.add(job.id)
        self._recorder.begin(job.id)
        self._meters[job.id] = ProgressMeter(self._clock())
        try:
            await self._engine.start_job(self._job_start(job, checkpoint))
        except EngineGoneError:
            pass  # `_lose_all` comes next, and counts it among those that the engine died of
        except CoserveError as error:
            self._taken.discard(job.id)
            await self._end(job.id, "failed", {"code": "job_refused", "message": str(error), "param": None})
        except Exception as error:  # a bug; of this job, and the others must not wait for it
            _log.exception("job %s could not be started", job.id)
            message = f"the job could not be started: {error!r}"
            await self._end(job.id, "failed", {"code": "job_refused", "message": message, "param": None})
        else:
            step = 0 if checkpoint is None else checkpoint[0]
            message = f"Fine-tuning goes on from step {step}" if step else "Fine-tuning job started"
            await self._in_store(self._set_status, job.id, "running", message)

    def _roll_back(self, job: JobRecord) -> tuple[tuple[int, str] | None, bool]:
        """Where a job goes on: step and directory; everything behind that is forgotten, as if it had not been. And
        whether there is nothing left to be done.
        """
        with self.store.write() as transaction:
            checkpoints = transaction.all_checkpoints(job.id)
            found = resume_point(checkpoints)
            last = checkpoints[-1] if checkpoints else None
            # The last checkpoint of all is the adapter alone, if the engine wrote it when the job was over.
            is_done = last is not None and found is not last and _is_final(last, job)
            if not is_done:
                transaction.roll_back(job.id, 0 if found is None else found.step)
            kept, _ = prune_records(transaction, job, is_terminal=False)
        self._folders.sweep(job.id, kept, is_terminal=False)
        return (None if found is None else (found.step, found.directory)), is_done

    def _job_start(self, job: JobRecord, checkpoint: tuple[int, str] | None) -> JobStart:
        settings = JobSettings.from_data(job.settings)
        return JobStart(
            id=job.id,
            name=job.name,
            examples=str(self._folders.examples(job.id)),
            validation=None if job.validation_file is None else str(self._folders.validation(job.id)),
            config=settings.tuning_config(job.num_examples),
            adapter=settings.adapter,
            start=None if job.start is None else AdapterRef(**job.start),
            checkpoint=None if checkpoint is None else checkpoint[1],
            checkpoints=str(self._folders.checkpoints(job.id)),
            checkpoint_every_steps=settings.checkpoint_every_steps,
        )

    # -- what clients asked for -----------------------------------------------------------------

    async def _create(self, record: JobRecord) -> JobRecord:
        await asyncio.to_thread(self._add, record)
        self._validate(record)
        return record

    def _add(self, record: JobRecord) -> None:
        with self.store.write() as transaction:
            for field in ("training_file", "validation_file"):
                if (id := getattr(record, field)) is None:
                    continue
                file = transaction.file(record.tenant, id)
                if file is None:
                    raise JobError(f"{field} {id!r} does not exist: upload it first", param=field)
                if file.purpose != "fine-tune":
                    raise JobError(f"{field} {id} was uploaded for {file.purpose!r}, not for 'fine-tune'", param=field)
            transaction.add_job(record)
            transaction.add_event(job_event(record, f"Created fine-tuning job: {record.id}"))
            transaction.add_event(job_event(record, f"Validating training file: {record.training_file}"))

    async def _cancel(self, tenant: str, id: str) -> JobRecord:
        job = await self._living(tenant, id)
        if id in self._taken:
            await self._tell(self._engine.cancel_job, id)
            job = await self._living(tenant, id)
        if id in self._validations:
            self._unwanted.add(id)
        return await self._end(job.id, "cancelled")

    async def _pause(self, tenant: str, id: str) -> JobRecord:
        job = await self._living(tenant, id)
        if job.status == "paused":
            raise JobError(f"Job {id} is paused already")
        if id in self._taken:
            await self._tell(self._engine.pause_job, id)
            await self._living(tenant, id)
        self._meters.pop(id, None)
        return await asyncio.to_thread(self._set_status, id, "paused", "Fine-tuning job paused")

    async def _resume(self, tenant: str, id: str) -> JobRecord:
        job = await self._living(tenant, id)
        if job.status != "paused":
            raise JobError(f"Job {id} is not paused: it is {job.status}")
        if not job.validated:
            if job.base != self.model.name:
                raise JobError(f"Job {id} is of the model {job.base}, which is not served now", param="model")
            job = await asyncio.to_thread(self._set_status, id, "validating_files", "Fine-tuning job resumed")
            self._validate(job)
            return job
        if id in self._taken:
            self._meters[id] = ProgressMeter(self._clock())
            self._recorder.begin(id)
            if await self._tell(self._engine.resume_job, id):
                return await asyncio.to_thread(self._set_status, id, "running", "Fine-tuning job resumed")
            await self._living(tenant, id)
        job = await asyncio.to_thread(self._set_status, id, "queued", "Fine-tuning job resumed")
        await self._take_up(job)
        return await asyncio.to_thread(self._job, id)

    async def _tell(self, verb: Callable[[str], Awaitable[None]], id: str) -> bool:
        """Tell the engine something about a job that it has, and take in what came of it; False if it is not there to
        do it.
        """
        try:
            await verb(id)
            return True
        except (EngineGoneError, JobError):  # it has died, or the job has ended meanwhile
            return False
        finally:
            await self._settle()

    async def _living(self, tenant: str, id: str) -> JobRecord:
        job = await asyncio.to_thread(self._find, tenant, id)
        if job is None:
            raise JobError(f"There is no fine-tuning job {id!r}")
        if job.is_terminal:
            raise JobError(f"Job {id} has already completed: it has {job.status}")
        return job

    # -- validation --------------------------------------------------------------------------

    def _validate(self, job: JobRecord) -> None:
        """Begin to read a job's files, unless that is under way."""
        if job.id not in self._validations:
            self._validations[job.id] = asyncio.create_task(self._validate_in_turn(job))

    async def _validate_in_turn(self, job: JobRecord) -> None:
        found: Validated | JobError
        try:
            async with self._one_validation:
                found = await asyncio.to_thread(
                    validate, job, self.files, self._folders, self.model, lambda: job.id not in self._unwanted
                )
        except JobError as error:
            found = error
        except Exception as error:
            _log.exception("the files of %s could not be read", job.id)
            found = JobError(f"the files could not be read: {error!r}", param="training_file")
        try:
            await self._call(lambda: self._validated(job.id, found))
        except (EngineGoneError, StoreError):
            pass  # shutting down: they are read again at the next start
        finally:  # not before: who resumes the job meanwhile must not begin to read them again
            del self._validations[job.id]
            self._unwanted.discard(job.id)

    async def _validated(self, id: str, found: Validated | JobError) -> None:
        job = await self._in_store(self._job, id)
        if job.is_terminal:
            self._folders.sweep(id, (), is_terminal=True)
            return
        if isinstance(found, JobError):
            code = f"invalid_{found.param}"
            await self._end(id, "failed", {"code": code, "message": str(found), "param": found.param})
            return
        job = await self._in_store(self._set_validated, job, found)
        if job.status == "queued":
            await self._take_up(job)

    def _set_validated(self, job: JobRecord, found: Validated) -> JobRecord:
        with self.store.write() as transaction:
            if found.num_cut:
                length = job.settings["max_sequence_length"]
                message = f"{found.num_cut} of {found.num_examples} examples were cut to {length} tokens"
                transaction.add_event(job_event(job, message, level="warn"))
            message = "Files validated, moving job to queued state" if job.status != "paused" else "Files validated"
            transaction.add_event(job_event(job, message))
            return transaction.change_job(
                job.id,
                status="paused" if job.status == "paused" else "queued",
                num_examples=found.num_examples,
                num_tokens=found.num_tokens,
                num_steps=found.num_steps,
            )

    # -- endings -----------------------------------------------------------------------------

    async def _end(
        self, id: str, status: Literal["succeeded", "failed", "cancelled"], error: dict[str, Any] | None = None
    ) -> JobRecord:
        """A job is over: what an engine may still say of it is too late."""
        job = await self._in_store(self._write_end, id, status, error)
        self._taken.discard(id)
        self._ended.discard(id)
        self._meters.pop(id, None)
        self._deaths.pop(id, None)
        self._live.pop((job.tenant, job.name), None)
        self._known = {}
        return job

    def _write_end(self, id: str, status: JobStatus, error: dict[str, Any] | None) -> JobRecord:
        job = self._job(id)
        if job.is_terminal:
            return job
        results = self._write_results(job) if status == "succeeded" else None
        with self.store.write() as transaction:
            kept, _ = prune_records(transaction, job, is_terminal=True)
            if status == "succeeded":
                assert results is not None
                transaction.add_file(results)
                transaction.put_adapter(adapter_of(job, job.name, kept[-1].directory))
                transaction.add_event(job_event(job, f"New fine-tuned model created: {job.name}"))
                transaction.add_event(job_event(job, "The job has successfully completed"))
            elif error is not None:
                transaction.add_event(job_event(job, f"The job failed: {error['message']}", level="error"))
            else:
                transaction.add_event(job_event(job, "The job was cancelled"))
            config = JobSettings.from_data(job.settings).tuning_config(max(1, job.num_examples))
            job = transaction.change_job(
                id,
                status=status,
                error=error,
                finished_at=int(time.time()),
                result_file=results.id if results is not None else None,
                trained_tokens=job.num_tokens * config.num_epochs if status == "succeeded" else None,
            )
        self._folders.sweep(id, kept, is_terminal=True)
        return job

    def _write_results(self, job: JobRecord) -> FileRecord:
        with self.store.read() as transaction:
            content = results_csv(transaction.metrics(job.id))
        id = new_id("file-")
        return FileRecord(
            id=id,
            tenant=job.tenant,
            purpose=RESULTS,
            filename=FILENAME,
            num_bytes=self.files.write_blob(id, [content]),
            created_at=int(time.time()),
        )

    async def _delete(self, tenant: str, name: str) -> bool:
        found = await asyncio.to_thread(self._delete_adapter, tenant, name)
        self._known = {}
        return found

    def _delete_adapter(self, tenant: str, name: str) -> bool:
        with self.store.write() as transaction:
            found = transaction.adapter(tenant, name)
            if found is None:
                if (tenant, name) in self._live:
                    raise JobError(f"{name} is being trained: cancel its job first", param="model")
                return False
            for job in transaction.unfinished_jobs():
                if job.id == found.job or (job.start is not None and job.start["directory"] == found.directory):
                    raise JobError(f"job {job.id} needs {name}: cancel it first, or wait for it", param="model")
            transaction.remove_adapter(tenant, name)
            if found.job:
                transaction.remove_checkpoint_of_name(found.job, name)
            is_unused = found.directory is not None and not transaction.adapters_in(found.directory)
        if is_unused and found.directory is not None and self._folders.holds(Path(found.directory)):
            remove_tree(Path(found.directory))
        return True

    # -- records (these block) -------------------------------------------------------------------

    def _find(self, tenant: str, id: str) -> JobRecord | None:
        with self.store.read() as transaction:
            return transaction.job(tenant, id)

    def _job(self, id: str) -> JobRecord:
        with self.store.read() as transaction:
            found = transaction.any_job(id)
        assert found is not None, f"job {id} is not in the store"
        return found

    def _unfinished(self) -> tuple[JobRecord, ...]:
        with self.store.read() as transaction:
            return transaction.unfinished_jobs()

    def _set_status(self, id: str, status: JobStatus, message: str) -> JobRecord:
        with self.store.write() as transaction:
            job = transaction.change_job(id, status=status)
            transaction.add_event(job_event(job, message))
        return job


def _is_final(checkpoint: CheckpointRecord, job: JobRecord) -> bool:
    is_whole = (Path(checkpoint.directory) / "adapter_config.json").is_file()
    return checkpoint.listed and checkpoint.step == job.num_steps and is_whole
