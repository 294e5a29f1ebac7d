"""What the engine's process does about adapters and jobs: it starts and ends them, and writes their checkpoints.

Checkpoints are copied between two steps, and written by a thread of their job, in order. What follows from one (the
reply to a pause, the event that a job has succeeded) is told when it is on disk, and not before. A pause or a
cancellation holds even if its checkpoint cannot be written: that is logged. A job that makes checkpoints faster than
the disk takes them is held back, alone: no step and no other job ever waits for its disk. So is one whose disk is full:
its checkpoints wait until there is room, but no pause, cancellation or shutdown waits for that.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from coserve.adapters.base import AdapterConfig
from coserve.adapters.peft_directory import adapter_config
from coserve.devices.job_messages import ReadContributions
from coserve.engine.commands import AdapterRef, CancelJob, CombineJob, JobStart, PauseJob, ResumeJob, StartJob
from coserve.engine.engine import Engine
from coserve.engine.jobs.checkpoint import write_contribution
from coserve.engine.jobs.events import JobEvent
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import AdapterError, CoserveError, DiskFullError, JobOverError
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.jobs.shared_files import SharedFiles
from coserve.protocol.messages import Reply
from coserve.worker.activity import Activity
from coserve.worker.disk_writers import DiskWriters
from coserve.worker.job_files import JobFiles
from coserve.worker.job_reports import PendingReport, PendingReports

_log = logging.getLogger(__name__)

# Copies of a job's tensors that may wait for the disk.
_MOST_COPIES = 2


class JobCommands:
    """Adapters and jobs of one engine."""

    def __init__(self, engine: Engine, activity: Activity | None = None, shared: SharedFiles | None = None) -> None:
        """activity: told whose files are read and written. shared: where their paths are (default: on disk here)."""
        self._engine, self._activity = engine, activity or Activity(None)
        self._shared = shared or SharedFiles()
        self._starts: dict[str, JobStart] = {}
        self._writers = DiskWriters()
        self._waiting: dict[str, deque[PendingReport]] = {}  # by job
        self._last: dict[str, PendingReport] = {}  # checkpoint of each job
        self._held: set[str] = set()  # jobs that wait for the disk

    # -- adapters -------------------------------------------------------------------

    def adapter_reading(self, adapter: AdapterRef, changed_by: str = "") -> Callable[[], AdapterLoad] | None:
        """What a thread is to do before `finish_adapter`; None if the device has the adapter. changed_by: see
        `LoadAdapter`.
        """
        if adapter.directory is None:
            return None
        try:
            load = self._engine.begin_load(adapter.name, adapter.directory)
        except AdapterError as error:
            return partial(_raise, error)
        return None if load is None else partial(self._read_adapter, load, changed_by)

    def finish_adapter(self, adapter: AdapterRef, load: AdapterLoad | None) -> None:
        """Have it on the device, now that it was read; it was used now."""
        if load is not None:
            self._engine.finish_load(load)
        elif adapter.directory is not None:
            self._engine.ensure_adapter(adapter.name, adapter.directory)

    def _read_adapter(self, load: AdapterLoad, changed_by: str) -> AdapterLoad:
        self._shared.fetch(Path(load.directory))
        return load.read(changed_by)

    def unload_adapter(self, name: str) -> None:
        """No new request finds it."""
        if name in self._engine.versions:
            self._engine.unload_adapter(name)

    # -- commands -------------------------------------------------------------------

    def read_files(self, job: JobStart) -> JobFiles:
        """What the files of a job hold; from any thread. DataError."""
        if job.config.evaluation.asks:
            self._engine.answers_tokenizer()  # here, and not within the first step that needs it
        with self._activity.files_of(job.id):
            read = JobFiles.read(job, self._shared)
        self._shared.trim(self._needed())
        return read

    def read_contributions(self, id: str, directories: Sequence[str]) -> None:
        """Have the device take in what the nodes of a job have contributed; from any thread. CoserveError of where they
        are shared.
        """
        for each in directories:
            self._shared.fetch(Path(each))
        self._engine.device.execute(ReadContributions(id, tuple(directories)))
        for each in directories:
            self._shared.release(Path(each))

    def _needed(self) -> frozenset[Path]:
        """What jobs begin with, which the device may not have read yet."""
        jobs = list(self._starts.values())
        named = [job.checkpoint for job in jobs] + [job.start.directory for job in jobs if job.start is not None]
        return frozenset(Path(each) for each in named if each is not None)

    def handle(
        self, command: StartJob | PauseJob | ResumeJob | CancelJob | CombineJob, read: Callable[[], Any] | None = None
    ) -> None:
        """Do it; `take_pending` brings the reply. read: gives the files of a job that starts, if they have been read;
        raises what was wrong with contributions.

        Raises:
            JobOverError: the job has ended. CoserveError: it is refused.
        """
        if isinstance(command, StartJob):
            self._start(command.job, read() if read is not None else self.read_files(command.job))
            self._tell(command.job.id, Reply(command.call))
            return
        if command.id not in self._starts:
            raise JobOverError(f"the engine does not have the job {command.id!r}: it is over, or was never started")
        if isinstance(command, ResumeJob):
            self._writers.take_time(command.id)
            self._engine.resume_job(command.id)
        elif isinstance(command, PauseJob):
            self._writers.hurry(command.id)
            self._engine.pause_job(command.id)
            self._held.discard(command.id)
            self._checkpoint(command.id, listed=False)
        elif isinstance(command, CombineJob):
            if read is not None:
                read()
            self._engine.combine(command.id, command.combination)
        else:
            self._writers.hurry(command.id)
            if command.keeps:  # before the end, which the optimizer's state does not outlive
                self._checkpoint(command.id, listed=False)
            for event in self._cancel(command.id):
                self._tell_event(event)
        self._tell(command.id, Reply(command.call))

    def _start(self, job: JobStart, files: JobFiles) -> None:
        if job.start is not None and job.checkpoint is None and job.start.directory is not None:
            self._engine.ensure_adapter(job.start.name, job.start.directory, job.model)
        if job.shard is not None:
            self.unload_adapter(job.name)  # of an attempt before, whose part here came to its end and others did not
        adapter: AdapterConfig | str | None = None
        if job.adapter is not None:
            adapter = adapter_config(job.adapter)
        elif job.start is not None:
            adapter = job.start.name
        self._engine.submit_examples(
            files.examples,
            job.config,
            adapter=adapter,
            name=job.name,
            validation=files.validation,
            job_id=job.id,
            checkpoint=job.checkpoint,
            tenant=job.tenant,
            alone_until_step=job.alone_until_step,
            model=job.model,
            shard=job.shard,
        )
        if job.model and job.start is not None:
            self.unload_adapter(job.start.name)  # nobody else can use it
        self._starts[job.id] = job
        self._writers.open(job.id)
        if job.paused:
            self._engine.pause_job(job.id)

    def checkpoint_all(self, call: int) -> None:
        """Of every job that is not over; the reply comes after the last."""
        self._writers.hurry_all()
        for job in self._starts:
            self._checkpoint(job, listed=False)
        wait([each.written for lane in self._waiting.values() for each in lane if each.written is not None])
        self._tell("", Reply(call))

    # -- what comes of steps ----------------------------------------------------------------

    def take(self, events: list[JobEvent]) -> None:
        """What a step brought; each event is told in its turn."""
        for event in events:
            job = self._starts.get(event.job)
            if event.kind == "succeeded" and job is not None:
                keeps_other = job.keep_best and self._engine.job(event.job).progress.best.step not in (0, event.step)
                last = self._checkpoint(event.job, listed=True, event=event)
                last.name = None if job.model or keeps_other or not _writes_checkpoints(job) else job.name
                self._forget(event.job, keep_versions=not (job.model or keeps_other))
                continue
            if event.kind == "contribution":
                self._contribute(event)
                continue
            self._tell_event(event)
            if job is None:
                continue
            every = job.checkpoint_every_steps
            is_due = event.kind == "step" and every and event.step % every == 0
            if is_due or (event.is_best and job.keep_best):
                self._checkpoint(event.job, listed=True)
            elif event.kind == "failed":
                self._forget(event.job, keep_versions=False)

    def take_pending(self) -> PendingReports:
        """What may be told now."""
        pending = PendingReports()
        for job, lane in list(self._waiting.items()):
            while lane and lane[0].is_ready:
                self._finish(lane.popleft(), pending)
            if not lane:
                del self._waiting[job]
                if job not in self._starts:
                    self._writers.drop(job)
        for job in [job for job in self._held if self._num_copies(job) < _MOST_COPIES]:
            self._held.discard(job)
            self._engine.resume_job(job)
        return pending

    @property
    def has_pending(self) -> bool:
        """Whether something may be told now."""
        return any(lane[0].is_ready for lane in self._waiting.values())

    @property
    def is_waiting(self) -> bool:
        """Whether there will be something to tell without a step."""
        return bool(self._waiting)

    def close(self) -> None:
        """End the threads, when all is written that there is room for."""
        self._writers.close()

    def _finish(self, done: PendingReport, pending: PendingReports) -> None:
        error: CoserveError | None = None
        directory = ""
        if done.contribution is not None and done.written is not None:
            if (failure := done.written.exception()) is None:
                pending.contributions.append(done.contribution)
            elif done.job in self._starts and not isinstance(failure, DiskFullError):  # which is waited for
                pending.events.append(self._fail(done.job, str(failure)))
            return
        if done.written is not None:
            try:
                directory = str(done.written.result())
                found = Checkpointed(job=done.job, step=done.step, directory=directory, listed=done.listed)
                pending.checkpoints += [found] if done.is_new else []
            except CoserveError as raised:
                error = raised
                _log.error("job %s: %s", done.job, error)
        if done.name is not None and done.name in self._engine.versions:
            if error is None:
                self._engine.ensure_adapter(done.name, directory)  # it is there; from now on it may make room
            else:
                self._engine.unload_adapter(done.name)
        is_success = done.event is not None and done.event.kind == "succeeded"
        if done.event is not None and not (is_success and isinstance(error, DiskFullError)):
            # Without room for its last checkpoint, which only a shutdown does not wait for, it is not over: it resumes.
            failed = error is not None and is_success
            pending.events.append(replace(done.event, kind="failed", message=str(error)) if failed else done.event)
        if done.call is not None:
            pending.replies.append(Reply(done.call))

    def _tell(self, job: str, reply: Reply) -> None:
        """After all that waits of this job."""
        self._append(PendingReport(job=job, step=0, listed=False, call=reply.call))

    def _tell_event(self, event: JobEvent) -> None:
        self._append(PendingReport(job=event.job, step=event.step, listed=False, event=event))

    def _append(self, waiting: PendingReport) -> None:
        self._waiting.setdefault(waiting.job, deque()).append(waiting)

    def _checkpoint(self, job: str, *, listed: bool, event: JobEvent | None = None) -> PendingReport:
        """Copy a job as it is now, and have it written, unless that step is on disk (or on its way) already, or another
        node writes it.
        """
        step, last = self._engine.job(job).checkpoint_step, self._last.get(job)
        waiting = PendingReport(job=job, step=step or 0, listed=listed, event=event)
        if step is None or not _writes_checkpoints(self._starts[job]):
            self._append(waiting)
            return waiting
        if last is not None and last.step == step and last.listed >= listed and not last.has_failed:
            waiting.written, waiting.is_new = last.written, False
        else:
            waiting.written = self._write(job)
            self._last[job] = waiting
        self._append(waiting)
        if self._num_copies(job) >= _MOST_COPIES and self._engine.job(job).state == "running":
            self._held.add(job)
            self._engine.pause_job(job)
        return waiting

    def _contribute(self, due: JobEvent) -> None:
        """Copy what the other nodes of a job are to have, and have it written."""
        start, job = self._starts[due.job], self._engine.job(due.job)
        assert start.shard is not None and job.exchange is not None
        directory = Path(start.shard.directory) / f"{due.step}-{start.shard.index}"
        told = Contributed(
            job=due.job,
            step=due.step,
            directory=str(directory),
            meets=job.exchange.meets,
            num_trained=job.progress.sums.num_trained,
        )
        waiting = PendingReport(job=due.job, step=due.step, listed=False, contribution=told)
        copy = self._engine.contribution(due.job)

        def write() -> Path:
            written = write_contribution(copy, directory)
            self._shared.keep(written)
            return written

        waiting.written = self._written(due.job, write, even_in_a_hurry=True)
        self._append(waiting)

    def _num_copies(self, job: str) -> int:
        """Copies of a job's tensors that are not on disk yet."""
        lane = self._waiting.get(job, ())
        return len({id(each.written) for each in lane if each.written is not None and not each.written.done()})

    def _write(self, job: str) -> "Future[Path]":
        try:
            checkpoint = self._engine.checkpoint(job)
        except CoserveError as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed
        parent = self._starts[job].checkpoints

        def write() -> Path:
            kept = self._shared.keep_checkpoint(checkpoint.write(parent))
            self._shared.trim(self._needed())
            return kept

        return self._written(job, write)

    def _written(self, job: str, write: Callable[[], Path], *, even_in_a_hurry: bool = False) -> "Future[Path]":
        def noted() -> Path:
            with self._activity.files_of(job):
                return write()

        return self._writers.write(job, noted, even_in_a_hurry=even_in_a_hurry)

    def _fail(self, job: str, message: str) -> JobEvent:
        """End a job that cannot be continued; what is to be told of it."""
        step = self._engine.job(job).num_steps_done
        self._cancel(job)
        return JobEvent(job=job, kind="failed", step=step, now_s=self._engine.device.clock.now(), message=message)

    def _cancel(self, job: str) -> list[JobEvent]:
        """Returns what the next step would tell of it: the job may have been started again by then."""
        self._engine.cancel_job(job)
        events = self._engine.outbox.take(lambda event: isinstance(event, JobEvent) and event.job == job)
        self._forget(job, keep_versions=False)
        return [event for event in events if isinstance(event, JobEvent)]

    def _forget(self, job: str, *, keep_versions: bool) -> None:
        """keep_versions: of the adapter that it has made; those of a job that did not succeed cannot be asked for."""
        self._engine.forget_job(job)
        started = self._starts.pop(job, None)
        if started is not None and not keep_versions:
            self.unload_adapter(started.name)
        self._last.pop(job, None)
        self._held.discard(job)


def _writes_checkpoints(job: JobStart) -> bool:
    """Of the nodes of a job, the first one does."""
    return job.shard is None or job.shard.index == 0


def _raise(error: CoserveError) -> NoReturn:
    raise error
