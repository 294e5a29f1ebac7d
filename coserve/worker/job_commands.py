"""Commands about adapters and jobs in the engine's process: it starts and ends jobs, and writes
their checkpoints.

Checkpoints are copied between two steps, and written by a thread of their job, in order. What
follows from one (the reply to a pause, the event that a job has succeeded) is reported once it is
on disk (`JobLane`). A pause or a cancellation takes effect even if its checkpoint cannot be
written, which is logged. A job that makes checkpoints faster than the disk takes them is paused,
alone: no step and no other job waits for its disk. So is one whose disk is full: its checkpoints
wait until there is room, but no pause, cancellation or shutdown waits for that.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from coserve.devices.messages.jobs import ReadContributions
from coserve.engine.commands import (
    NO_CALL,
    AdapterRef,
    CancelJob,
    CombineJob,
    JobExamples,
    JobStart,
    PauseJob,
    ResumeJob,
    StartJob,
)
from coserve.engine.engine import Engine
from coserve.engine.jobs.checkpoint import write_contribution
from coserve.engine.jobs.events import JobEvent
from coserve.engine.served_adapters import AdapterLoad
from coserve.errors import AdapterError, CoserveError, DiskFullError, JobOverError
from coserve.jobs.files.shared_files import SharedFiles
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.protocol.messages import CallReply
from coserve.worker.activity import Activity
from coserve.worker.job_files import read_job_files
from coserve.worker.job_reports import JobLane, PendingReport, ReadyReports

_log = logging.getLogger(__name__)


class JobCommands:
    """Adapters and jobs of one engine."""

    def __init__(
        self, engine: Engine, activity: Activity | None = None, shared: SharedFiles | None = None
    ) -> None:
        """Connect jobs with an engine.

        Args:
            engine: Engine that runs them.
            activity: Records whose files are read and written.
            shared: Storage of their paths (default: this machine's disk).
        """
        self._engine, self._activity = engine, activity or Activity(None)
        self._shared = shared or SharedFiles()
        # Jobs that the engine has, and jobs whose reports wait.
        self._lanes: dict[str, JobLane] = {}
        self._closing = Event()

    # -- adapters -------------------------------------------------------------------

    def adapter_reading(
        self, adapter: AdapterRef, changed_by: str = ""
    ) -> Callable[[], AdapterLoad] | None:
        """Return what a thread must call before a `LoadAdapter` is handled; None if the device has
        the adapter.

        Args:
            adapter: Adapter to load.
            changed_by: See `LoadAdapter`.
        """
        if adapter.directory is None:
            return None
        try:
            load = self._engine.begin_load(adapter.name, adapter.directory)
        except AdapterError as error:
            return partial(_raise, error)
        return None if load is None else partial(self._read_adapter, load, changed_by)

    def _read_adapter(self, load: AdapterLoad, changed_by: str) -> AdapterLoad:
        self._shared.fetch(Path(load.directory))
        return load.read(changed_by)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter if it is there; no new request finds it."""
        if name in self._engine.versions:
            self._engine.unload_adapter(name)

    # -- commands -------------------------------------------------------------------

    def read_files(self, job: JobStart) -> JobExamples:
        """Read the files of a job; may be called from any thread.

        Raises:
            DataError: A file is damaged or missing.
        """
        if job.config.evaluation.asks:
            self._engine.answers_tokenizer()  # loaded now, so that no step waits for it
        with self._activity.files_of(job.id):
            read = read_job_files(job, self._shared)
        self._shared.trim(self._needed())
        return read

    def read_contributions(self, id: str, directories: Sequence[str]) -> None:
        """Load the contributions of a job's nodes onto the device; may be called from any thread.

        Raises:
            CoserveError: The shared storage cannot be read.
        """
        for each in directories:
            self._shared.fetch(Path(each))
        self._engine.device.execute(ReadContributions(id, tuple(directories)))
        # The device has them now, and this machine's copies may go.
        for each in directories:
            self._shared.release(Path(each))

    def _needed(self) -> frozenset[Path]:
        """Return the directories that jobs start from, which the device may not have read yet."""
        starts = [lane.start for lane in list(self._lanes.values())]
        jobs = [start for start in starts if start is not None]
        named = [job.checkpoint for job in jobs] + [
            job.start.directory for job in jobs if job.start is not None
        ]
        return frozenset(Path(each) for each in named if each is not None)

    def handle(
        self,
        command: StartJob | PauseJob | ResumeJob | CancelJob | CombineJob,
        read: Callable[[], Any] | None = None,
    ) -> None:
        """Run a command; `take_pending` returns its reply.

        Args:
            command: Command to run.
            read: Returns the files of a job that starts; raises an error of reading.

        Raises:
            JobOverError: The job has ended.
            CoserveError: The command is refused.
        """
        match command:
            case StartJob(job=job):
                self._start(command, read() if read is not None else self.read_files(job))
                self._queue_reply(job.id, CallReply(command.call))
                return
            case ResumeJob():
                self._living_lane(command.id).take_time()
                self._engine.handle(command)
            case PauseJob():
                lane = self._living_lane(command.id)
                # The reply waits for the checkpoint, which therefore must not wait for room.
                lane.hurry()
                self._engine.handle(command)
                # The client has paused the job, so that a disk that catches up must not resume it.
                lane.is_held = False
                self._checkpoint(command.id, listed=False)
            case CombineJob():
                self._living_lane(command.id)
                if read is not None:
                    read()
                self._engine.handle(command)
            case CancelJob():
                self._living_lane(command.id).hurry()
                if command.keeps:  # before the end, which deletes the optimizer's state
                    self._checkpoint(command.id, listed=False)
                for event in self._cancel(command):
                    self._queue_event(event)
        self._queue_reply(command.id, CallReply(command.call))

    def _living_lane(self, job: str) -> JobLane:
        """Return the lane of a job that the engine has; JobOverError if it has ended."""
        lane = self._lanes.get(job)
        if lane is None or lane.start is None:
            raise JobOverError(
                f"the engine does not have the job {job!r}: it is over, or was never started"
            )
        return lane

    def _start(self, command: StartJob, data: JobExamples) -> None:
        job = command.job
        if job.start is not None and job.checkpoint is None and job.start.directory is not None:
            self._engine.ensure_adapter(job.start.name, job.start.directory, job.model)
        if job.shard is not None:
            # An earlier attempt may have ended here, and not on other nodes.
            self.unload_adapter(job.name)
        self._engine.handle(command, data)
        if job.model and job.start is not None:
            self.unload_adapter(job.start.name)  # no other job or request can use it
        self._lane(job.id).begin(job)
        if job.paused:
            self._engine.pause_job(job.id)

    def checkpoint_all(self, call: int) -> None:
        """Write a checkpoint of every job that is not over; the reply follows the last one."""
        self._hurry_all()
        for id in self._started():
            self._checkpoint(id, listed=False)
        # All lanes hurry, so that nothing waits for room and this ends.
        wait([written for lane in self._lanes.values() for written in lane.unwritten()])
        self._queue_reply("", CallReply(call))

    # -- what comes of steps ----------------------------------------------------------------

    def take(self, events: list[JobEvent]) -> None:
        """Take the events of a step; each is reported in its turn."""
        for event in events:
            job = self._start_of(event.job)
            if event.kind == "succeeded" and job is not None:
                # The served model is then the best checkpoint, not the weights that the device has.
                keeps_other = job.keep_best and self._engine.job(
                    event.job
                ).progress.best.step not in (0, event.step)
                last = self._checkpoint(event.job, listed=True, event=event)
                last.adapter = (
                    None if job.model or keeps_other or not _writes_checkpoints(job) else job.name
                )
                self._forget(event.job, keep_versions=not (job.model or keeps_other))
                continue
            # Reported by `_finish` once it is written.
            if event.kind == "contribution":
                self._contribute(event)
                continue
            self._queue_event(event)
            if job is None:
                continue
            every = job.checkpoint_every_steps
            is_due = event.kind == "step" and every and event.step % every == 0
            # Listed: the interval and the best evaluation are promised to clients.
            if is_due or (event.is_best and job.keep_best):
                self._checkpoint(event.job, listed=True)
            elif event.kind == "failed":
                self._forget(event.job, keep_versions=False)

    def take_pending(self) -> ReadyReports:
        """Take all reports that are ready, and resume jobs that waited for the disk."""
        reports = ReadyReports()
        for id, lane in list(self._lanes.items()):
            while lane.has_ready:
                self._finish(lane.pop_ready(), reports)
            if lane.is_empty and lane.start is None:
                lane.close()
                del self._lanes[id]
            # The disk has caught up.
            elif lane.is_held and not lane.has_max_copies:
                lane.is_held = False
                self._engine.resume_job(id)
        return reports

    @property
    def has_pending(self) -> bool:
        """Return whether a report is ready."""
        return any(lane.has_ready for lane in self._lanes.values())

    @property
    def is_waiting(self) -> bool:
        """Return whether a report will become ready without a step."""
        return any(not lane.is_empty for lane in self._lanes.values())

    def close(self) -> None:
        """End the threads, once everything is written that there is room for."""
        self._hurry_all()
        for lane in self._lanes.values():
            lane.close()

    def _hurry_all(self) -> None:
        """Let nothing wait for room on a full disk any more."""
        self._closing.set()
        for lane in self._lanes.values():
            lane.hurry()

    def _finish(self, done: PendingReport, pending: ReadyReports) -> None:
        error: CoserveError | None = None
        directory = ""
        # The other nodes wait for a contribution, so that the job fails without it.
        if done.contribution is not None and done.written is not None:
            if (failure := done.written.exception()) is None:
                pending.contributions.append(done.contribution)
            elif self._start_of(done.job) is not None and not isinstance(failure, DiskFullError):
                # A full disk is waited for; only a shutdown ends that wait.
                pending.events.append(self._fail(done.job, str(failure)))
            return
        if done.written is not None:
            try:
                directory = str(done.written.result())
                checkpoint = Checkpointed(
                    job=done.job, step=done.step, directory=directory, listed=done.listed
                )
                pending.checkpoints += [checkpoint] if done.is_new else []
            except CoserveError as raised:
                error = raised
                _log.error("job %s: %s", done.job, error)
        if done.adapter is not None and done.adapter in self._engine.versions:
            if error is None:
                # It is loaded already; now that it is on disk, it may be evicted.
                self._engine.ensure_adapter(done.adapter, directory)
            else:
                self._engine.unload_adapter(done.adapter)
        is_success = done.event is not None and done.event.kind == "succeeded"
        if done.event is not None and not (is_success and isinstance(error, DiskFullError)):
            # Without room for its last checkpoint, for which only a shutdown does not wait, the
            # job is not over: it resumes.
            failed = error is not None and is_success
            pending.events.append(
                replace(done.event, kind="failed", message=str(error)) if failed else done.event
            )
        if done.call is not None:
            pending.replies.append(CallReply(done.call))

    def _lane(self, job: str) -> JobLane:
        return self._lanes.setdefault(job, JobLane())

    def _start_of(self, job: str) -> JobStart | None:
        """Return the command that started a job; None: the engine does not have it."""
        return self._lanes[job].start if job in self._lanes else None

    def _started(self) -> list[str]:
        """Return the jobs that the engine has."""
        return [id for id, lane in self._lanes.items() if lane.start is not None]

    def _queue_reply(self, job: str, reply: CallReply) -> None:
        """Queue the reply to a command after all reports of the job."""
        self._lane(job).append(PendingReport(job=job, call=reply.call))

    def _queue_event(self, event: JobEvent) -> None:
        self._lane(event.job).append(PendingReport(job=event.job, step=event.step, event=event))

    def _checkpoint(
        self, job: str, *, listed: bool, event: JobEvent | None = None
    ) -> PendingReport:
        """Copy a job as it is now, and start to write it, unless that step is on disk or on its
        way, or another node writes it.
        """
        lane, start = self._lanes[job], self._start_of(job)
        assert start is not None, f"the engine has the job {job}"
        step, last = self._engine.job(job).progress.checkpoint_step, lane.last_checkpoint
        report = PendingReport(job=job, step=step or 0, listed=listed, event=event)
        # Nothing to write, but the report keeps its place among those of the job.
        if step is None or not _writes_checkpoints(start):
            lane.append(report)
            return report
        # This step is on disk or on its way: report the same files again rather than copy them.
        if last is not None and last.step == step and last.listed >= listed and not last.has_failed:
            report.written, report.is_new = last.written, False
        else:
            report.written = self._write(job, start)
            lane.last_checkpoint = report
        lane.append(report)
        # More copies would fill the memory faster than the disk empties it.
        if lane.has_max_copies and self._engine.job(job).state == "running":
            lane.is_held = True
            self._engine.pause_job(job)
        return report

    def _contribute(self, due: JobEvent) -> None:
        """Copy the contribution for a job's other nodes, and start to write it."""
        start, job = self._start_of(due.job), self._engine.job(due.job)
        assert start is not None and start.shard is not None and job.exchange is not None
        directory = Path(start.shard.directory) / f"{due.step}-{start.shard.index}"
        contribution = Contributed(
            job=due.job,
            step=due.step,
            directory=str(directory),
            meets=job.exchange.meets,
            num_trained=job.progress.sums.num_trained,
        )
        report = PendingReport(job=due.job, step=due.step, contribution=contribution)
        copy = self._engine.contribution(due.job)

        def write() -> Path:
            written = write_contribution(copy, directory)
            self._shared.keep(written)
            return written

        report.written = self._written(due.job, write, until=self._closing)
        self._lanes[due.job].append(report)

    def _write(self, job: str, start: JobStart) -> "Future[Path]":
        try:
            checkpoint = self._engine.checkpoint(job)
        except CoserveError as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed

        def write() -> Path:
            kept = self._shared.keep_checkpoint(checkpoint.write(start.checkpoints))
            self._shared.trim(self._needed())
            return kept

        return self._written(job, write)

    def _written(
        self, job: str, write: Callable[[], Path], *, until: Event | None = None
    ) -> "Future[Path]":
        def noted() -> Path:
            with self._activity.files_of(job):
                return write()

        return self._lanes[job].write(noted, until=until)

    def _fail(self, job: str, message: str) -> JobEvent:
        """End a job that cannot continue, and return the event that reports it."""
        step = self._engine.job(job).num_steps_done
        self._cancel(CancelJob(NO_CALL, job))
        return JobEvent(
            job=job,
            kind="failed",
            step=step,
            now_s=self._engine.device.clock.now(),
            message=message,
        )

    def _cancel(self, command: CancelJob) -> list[JobEvent]:
        """Cancel a job and return its events, which must not wait for the next step: by then, the
        job may have been started again.
        """
        job = command.id
        self._engine.handle(command)
        events = self._engine.outbox.take(
            lambda event: isinstance(event, JobEvent) and event.job == job
        )
        self._forget(job, keep_versions=False)
        return [event for event in events if isinstance(event, JobEvent)]

    def _forget(self, job: str, *, keep_versions: bool) -> None:
        """Drop a job.

        Args:
            job: Id of the job.
            keep_versions: Whether its adapter stays loaded; that of a job that did not succeed
                cannot be requested.
        """
        self._engine.forget_job(job)
        lane = self._lanes.get(job)
        if lane is None:
            return
        if lane.start is not None and not keep_versions:
            self.unload_adapter(lane.start.name)
        lane.forget()


def _writes_checkpoints(job: JobStart) -> bool:
    """Return whether this node writes the job's checkpoints: the first one of its nodes does."""
    return job.shard is None or job.shard.index == 0


def _raise(error: CoserveError) -> NoReturn:
    raise error
