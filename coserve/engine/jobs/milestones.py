"""What follows from an optimizer step: a version, an evaluation with its answers, the next step or the end."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from coserve.devices.base import Device
from coserve.engine.jobs.answers import Answers
from coserve.engine.jobs.endings import JobEndings
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import DeviceMemoryError


class JobMilestones:
    """Of the jobs on one device."""

    def __init__(
        self,
        device: Device,
        adapters: ServedAdapters,
        answers: Answers,
        endings: JobEndings,
        emit: Callable[[JobEvent], None],
    ) -> None:
        self._device, self._adapters, self._answers = device, adapters, answers
        self._endings, self._emit = endings, emit

    def follow(self, job: Job) -> None:
        """Do what is due of a job that is not over."""
        if job.follow_due and not job.is_terminal and not (job.exchange and job.exchange.is_waiting):
            self._follow_update(job)
        if job.answers_due and job.state == "running":
            self._follow_questions(job)

    def note_change(self, job: Job) -> None:
        """What it trains is another now, and serves, if it is the model itself."""
        self._adapters.versions.num_model_changes += job.costs.changes_model

    def finish_evaluation(self, job: Job, answers: Mapping[str, float]) -> None:
        """Its validation set has been measured; answers: what came of its questions, by the metric's name."""
        self._emit(job.finish_evaluation(self._device.clock.now(), answers))
        self._next_step(job)

    def publish(self, job: Job, *, transient: bool = False, step: int | None = None) -> None:
        """Serve its adapter as it is. step: that nodes have made on the average, where that is not the job's own."""
        step = job.num_steps_done if step is None else step
        try:
            version = self._adapters.publish(
                job.id, job.name, step, costs=job.costs, transient=transient, model=job.model
            )
        except DeviceMemoryError as error:
            self._endings.fail(job, f"out of memory where {job.name}@{step} was to be kept: {error}")
            return
        self._emit(job.event("version", self._device.clock.now(), version=version.label))

    def serve_again(self, job: Job) -> None:
        """What a live job resumes from serves at once, as it did before; that was told when it was made. Without room
        its next step serves, or says so. What many nodes train has a name where they meet.
        """
        if job.config.live and job.num_steps_done and job.exchange is None:
            with suppress(DeviceMemoryError):
                self._adapters.publish(
                    job.id, job.name, job.num_steps_done, costs=job.costs, transient=True, model=job.model
                )

    def _follow_update(self, job: Job) -> None:
        """A version, an evaluation (unless that was done), the next step."""
        step, config = job.num_steps_done, job.config
        last = step == job.order.num_steps
        if job.exchange is not None and not job.exchange.holds_what_all_hold(step):
            pass  # nobody else has what it has now: that has no name
        elif config.live:
            self.publish(job, transient=not last)
        elif last or (config.publish_every_steps and step % config.publish_every_steps == 0):
            self.publish(job)
        if job.is_terminal:
            return
        job.follow_due = False
        due = last or (config.evaluate_every_steps and step % config.evaluate_every_steps == 0)
        if not (due and not job.evaluated and job.start_evaluation()):
            self._next_step(job)

    def _follow_questions(self, job: Job) -> None:
        """Have the questions of its validation set answered, or continue if they are."""
        try:
            self._answers.begin(job)
        except DeviceMemoryError as error:
            self._endings.fail(job, f"out of memory where {job.name}@{job.num_steps_done} was to be evaluated: {error}")
            return
        if (found := self._answers.found(job)) is not None:
            self.finish_evaluation(job, found)

    def _next_step(self, job: Job) -> None:
        """Begin the next optimizer step, or end the job: after its last step, or where it stops early."""
        if job.stops_early and job.num_steps_done < job.order.num_steps:
            self.publish(job)  # what serves now is what the job has made
            if not job.is_terminal:
                self._endings.end(job, "succeeded")
        elif not job.start_step():
            self._endings.end(job, "succeeded")
