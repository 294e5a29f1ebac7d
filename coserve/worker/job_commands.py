"""What the engine's process does about adapters and jobs: it starts and ends them, and writes their checkpoints.

Checkpoints are copied between two steps, and written by a thread, in order. What follows from one (the reply to a
pause, the event that a job has succeeded) is told when it is on disk, and not before.
"""

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from coserve.adapters.base import AdapterConfig
from coserve.adapters.peft_directory import adapter_config
from coserve.engine.engine import Engine
from coserve.engine.job import JobEvent
from coserve.errors import CoserveError
from coserve.jobs.examples import read_examples_file
from coserve.jobs.messages import Checkpointed, JobStart
from coserve.jobs.records import AdapterRef
from coserve.worker.protocol import CancelJob, PauseJob, Reply, ResumeJob, StartJob

_log = logging.getLogger(__name__)

# Copies of jobs' tensors that may wait for the disk.
_MOST_WAITING = 8


@dataclass(kw_only=True)
class PendingReports:
    """What is to be told of jobs, in this order: events, checkpoints, replies."""

    events: list[JobEvent] = field(default_factory=list)
    checkpoints: list[Checkpointed] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.checkpoints or self.replies)


@dataclass(kw_only=True)
class _Waiting:
    """What is to be told when a checkpoint is on disk. written: None if there was nothing to write. is_new: whether the
    checkpoint itself is to be told. name: of the adapter on the device that is on disk with it.
    """

    job: str
    step: int
    listed: bool
    written: "Future[Path] | None" = None
    is_new: bool = True
    event: JobEvent | None = None
    call: int | None = None
    name: str | None = None


class JobCommands:
    """Adapters and jobs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._starts: dict[str, JobStart] = {}
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._waiting: deque[_Waiting] = deque()
        self._last: dict[str, _Waiting] = {}  # checkpoint of each job

    # -- adapters -------------------------------------------------------------------

    def ensure_adapter(self, adapter: AdapterRef) -> None:
        """Have it on the device."""
        if adapter.directory is not None:
            self._engine.ensure_adapter(adapter.name, adapter.directory)

    def unload_adapter(self, name: str) -> None:
        """No new request finds it."""
        if name in self._engine.versions:
            self._engine.unload_adapter(name)

    # -- commands -------------------------------------------------------------------

    def handle(self, command: "StartJob | PauseJob | ResumeJob | CancelJob") -> None:
        """Do it; `take_pending` brings the reply. CoserveError if it is refused."""
        if isinstance(command, StartJob):
            self._start(command.job)
            self._tell(Reply(command.call))
        elif isinstance(command, ResumeJob):
            self._engine.resume_job(command.id)
            self._tell(Reply(command.call))
        elif isinstance(command, PauseJob):
            self._engine.pause_job(command.id)
            self._checkpoint(command.id, listed=False, call=command.call)
        else:
            # Before the end, which the optimizer's state does not outlive.
            if not self._engine.job(command.id).is_terminal:
                self._checkpoint(command.id, listed=False)
            self._engine.cancel_job(command.id)
            self._forget(command.id, keep_versions=False)
            self._tell(Reply(command.call))

    def _start(self, job: JobStart) -> None:
        if job.start is not None and job.checkpoint is None:
            self.ensure_adapter(job.start)
        adapter: AdapterConfig | str | None = None
        if job.adapter is not None:
            adapter = adapter_config(job.adapter)
        elif job.start is not None:
            adapter = job.start.name
        self._engine.submit_examples(
            read_examples_file(job.examples),
            job.config,
            adapter=adapter,
            name=job.name,
            validation=() if job.validation is None else read_examples_file(job.validation),
            job_id=job.id,
            checkpoint=job.checkpoint,
        )
        self._starts[job.id] = job
        if job.paused:
            self._engine.pause_job(job.id)

    def checkpoint_all(self, call: int) -> None:
        """Of every job that is not over; the reply comes after the last."""
        for job in self._starts:
            self._checkpoint(job, listed=False)
        self._tell(Reply(call))
        wait([each.written for each in self._waiting if each.written is not None])

    # -- what comes of steps ----------------------------------------------------------------

    def take(self, events: list[JobEvent]) -> None:
        """What a step brought; each event is told in its turn."""
        for event in events:
            job = self._starts.get(event.job)
            if event.kind == "succeeded" and job is not None:
                self._checkpoint(event.job, listed=True, event=event)
                self._waiting[-1].name = job.name
                self._forget(event.job, keep_versions=True)
                continue
            self._tell_event(event)
            if job is None:
                continue
            every = job.checkpoint_every_steps
            if event.kind == "step" and every and event.step % every == 0:
                self._checkpoint(event.job, listed=True)
            elif event.kind in ("failed", "cancelled"):
                self._forget(event.job, keep_versions=False)

    def take_pending(self) -> PendingReports:
        """What may be told now."""
        pending = PendingReports()
        while self.has_pending:
            self._finish(self._waiting.popleft(), pending)
        return pending

    @property
    def has_pending(self) -> bool:
        """Whether something may be told now."""
        return bool(self._waiting) and (self._waiting[0].written is None or self._waiting[0].written.done())

    @property
    def is_waiting(self) -> bool:
        """Whether there will be something to tell without a step."""
        return bool(self._waiting)

    def close(self) -> None:
        """End the thread, when all is written."""
        self._writer.shutdown()

    def _finish(self, done: _Waiting, pending: PendingReports) -> None:
        error: CoserveError | None = None
        directory = ""
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
        if done.event is not None:
            failed = error is not None and done.event.kind == "succeeded"
            pending.events.append(replace(done.event, kind="failed", message=str(error)) if failed else done.event)
        if done.call is not None:
            pending.replies.append(
                Reply(done.call) if error is None else Reply(done.call, str(error), type(error).__name__)
            )

    def _tell(self, reply: Reply) -> None:
        """After all that waits."""
        self._waiting.append(_Waiting(job="", step=0, listed=False, call=reply.call))

    def _tell_event(self, event: JobEvent) -> None:
        self._waiting.append(_Waiting(job=event.job, step=event.step, listed=False, event=event))

    def _checkpoint(self, job: str, *, listed: bool, event: JobEvent | None = None, call: int | None = None) -> None:
        """Copy a job as it is now, and have it written, unless that step is on disk (or on its way) already."""
        step, last = self._engine.job(job).num_steps_done, self._last.get(job)
        waiting = _Waiting(job=job, step=step, listed=listed, event=event, call=call)
        if last is not None and last.step == step and last.listed >= listed and not _failed(last):
            waiting.written, waiting.is_new = last.written, False
        else:
            waiting.written = self._write(job)
            self._last[job] = waiting
        self._waiting.append(waiting)

    def _write(self, job: str) -> "Future[Path]":
        try:
            checkpoint = self._engine.checkpoint(job)
        except CoserveError as error:
            failed: Future[Path] = Future()
            failed.set_exception(error)
            return failed
        under_way = [each.written for each in self._waiting if each.written is not None and not each.written.done()]
        wait(under_way[: max(0, len(under_way) - _MOST_WAITING)])
        return self._writer.submit(checkpoint.write, self._starts[job].checkpoints)

    def _forget(self, job: str, *, keep_versions: bool) -> None:
        """keep_versions: of the adapter that it has made; those of a job that did not succeed cannot be asked for."""
        self._engine.forget_job(job)
        started = self._starts.pop(job, None)
        if started is not None and not keep_versions:
            self.unload_adapter(started.name)
        self._last.pop(job, None)


def _failed(waiting: _Waiting) -> bool:
    """Whether it could not be written."""
    written = waiting.written
    return written is not None and written.done() and written.exception() is not None
