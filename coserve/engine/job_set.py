"""The jobs of an engine: what starts and ends them, and what follows from an optimizer step."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coserve.devices.base import Device
from coserve.devices.messages import (
    CloseTrainer,
    CombineContributions,
    Command,
    DropTrainer,
    StepBatch,
    StepResult,
    TakeCheckpoint,
    TakeContribution,
)
from coserve.engine.answers import Answers
from coserve.engine.checkpoint import Checkpoint, TakenCopy
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.job import EventKind, Job, JobEvent
from coserve.engine.job_opening import JobOpener
from coserve.engine.job_packs import JobPacks
from coserve.engine.job_start import PeftFields
from coserve.engine.optimizer_swap import OptimizerSwap
from coserve.engine.owed_commands import OwedCommands
from coserve.engine.page_broker import PageBroker
from coserve.engine.records import WindowUse
from coserve.engine.served_adapters import ServedAdapters
from coserve.engine.step_shares import joined_jobs, largest_pieces, shares_of_time
from coserve.errors import DeviceGoneError, DeviceMemoryError, JobError
from coserve.memory.pack_pages import PackPages
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobView
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Combination, Shard


class JobSet(Mapping[str, Job]):
    """Every job that has not been forgotten, by id.

    A caller can be interrupted in any command to the device, and then does not know whether it was done. So what
    happens is booked first. What the device must do for it is owed until it has been done (again, if need be), and is
    done before anything else is asked of it; what follows from an optimizer step is due until it has followed.
    """

    def __init__(
        self,
        device: Device,
        pages: PageBroker,
        swap: HostSwap,
        adapters: ServedAdapters,
        counters: TokenCounters,
        latency: LatencyModel,
        *,
        owed: OwedCommands,
        opener: JobOpener,
        answers: Answers,
        emit: Callable[[JobEvent], None],
        send: Callable[[Command], None],
    ) -> None:
        """owed: what the device must do, shared with others. answers: to validation sets. emit: takes events. send:
        has the device do a command with the next step.
        """
        self._device, self._pages, self._swap = device, pages, swap
        self._adapters, self._counters, self._emit, self._send = adapters, counters, emit, send
        self._answers = answers
        self._jobs: dict[str, Job] = {}
        self._num_tokens_forgotten = self._num_drops_forgotten = self._num_checkpoints = self._num_turns = 0
        self.window_use = WindowUse()
        self._owed, self._opener = owed, opener
        self._optimizers = OptimizerSwap(device, swap, owed, latency)
        self._packs = JobPacks(
            device,
            pages,
            swap,
            self._owed,
            on_drop=lambda job: self._tell(job, "pack_dropped"),
            on_memory_error=self._note_memory_failure,
        )

    # -- questions ----------------------------------------------------------------

    def __getitem__(self, job_id: str) -> Job:
        return self._jobs[job_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, job_id: str) -> Job:
        """JobError if there is none."""
        if job_id not in self._jobs:
            raise JobError(f"there is no job {job_id!r}; there are: {', '.join(self._jobs) or 'none'}")
        return self._jobs[job_id]

    @property
    def num_running(self) -> int:
        """Jobs that are neither over nor paused."""
        return sum(job.state == "running" for job in self._jobs.values())

    @property
    def num_tokens_trained(self) -> int:
        """Rows of packs whose gradients are in, of all jobs here."""
        return self._num_tokens_forgotten + sum(job.num_tokens_trained for job in self._jobs.values())

    @property
    def num_packs_dropped(self) -> int:
        return self._num_drops_forgotten + sum(job.num_drops for job in self._jobs.values())

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Jobs that run whose last tasklets were one batch of rows."""
        running = {job.id for job in self._jobs.values() if job.state == "running"}
        groups = {tuple(sorted(self._jobs[job].joined & running)) for job in running}
        return tuple(sorted(group for group in groups if len(group) > 1))

    @property
    def packs(self) -> list[PackPages]:
        """Pages of the packs in memory."""
        return [job.pack_pages for job in self._jobs.values() if job.pack_pages is not None]

    @property
    def on_host(self) -> list[HostOwner]:
        """What they have there."""
        packs: list[HostOwner] = [("pack", job.id) for job in self._jobs.values() if job.swapped]
        return [*packs, *[("optimizer", job.id) for job in self._jobs.values() if job.optimizer_away]]

    def views(self, now_s: float, *, without: Collection[str] = ()) -> tuple[JobView, ...]:
        """Jobs that could do something, the one that has been served least first; without those that are held back, or
        whose optimizer is not back from the host.

        Where some are to be alone, they and all others take turns.
        """
        jobs = [job for job in self._jobs.values() if job.id not in without and not job.memory_failures.num_turns]
        running = [job for job in jobs if job.state == "running" and not job.optimizer_away]
        running.sort(key=lambda job: job.num_rows_run)
        views = tuple([view for job in running if (view := job.view(now_s, self._packs.num_pages(job))) is not None])
        return self._in_turn(views) if any(job.is_alone for job in running) else views

    def _in_turn(self, views: tuple[JobView, ...]) -> tuple[JobView, ...]:
        alone = sorted(view.id for view in views if self._jobs[view.id].is_alone)
        groups = [[id] for id in alone]
        if others := [view.id for view in views if view.id not in alone]:
            groups.append(others)
        if not groups:
            return ()
        chosen = groups[self._num_turns % len(groups)]
        return tuple([view for view in views if view.id in chosen])

    # -- life -----------------------------------------------------------------------

    def submit(
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
        alone_until_step: int,
        model: str,
        shard: Shard | None,
    ) -> None:
        """Start a job, or resume one; see `EngineCore.submit_examples`."""
        if job_id in self._jobs:
            raise JobError(f"there is a job {job_id!r} already")
        job = self._opener.open(
            job_id,
            name,
            config,
            examples,
            validation,
            adapter=adapter,
            checkpoint=checkpoint,
            tenant=tenant,
            model=model,
            shard=shard,
            others=self._jobs.values(),
        )
        job.alone_until_step = alone_until_step
        self._num_tokens_forgotten -= job.num_tokens_trained  # of one that is resumed: another engine's
        self._jobs[job_id] = job
        self._counters.arrive(tenant)
        self.catch_up()

    def pause(self, job_id: str) -> None:
        """Let it rest where it is; its pack goes to the host, or goes, and is begun again later; its optimizer goes to
        the host, or stays.
        """
        job = self._living(job_id)
        if job.has_pack:
            self._packs.put_away(job, self._device.clock.now())
        if job.state == "running":
            self._counters.leave(job.tenant)
        job.state = "paused"
        self._answers.cancel(job)
        self._optimizers.put_away(job)
        self.settle()

    def resume(self, job_id: str) -> None:
        """The inverse."""
        job = self._living(job_id)
        if job.state == "paused":
            self._counters.arrive(job.tenant)
        job.state = "running"

    def cancel(self, job_id: str) -> None:
        """End it at once; versions that it has published stay."""
        self._end(self._living(job_id), "cancelled")
        self.settle()

    def forget(self, job_id: str) -> None:
        """Let go of a job that is over; versions that it has published stay."""
        job = self.find(job_id)
        if not job.is_terminal:
            raise JobError(f"job {job_id!r} is {job.state}: cancel it first")
        self._num_tokens_forgotten += job.num_tokens_trained
        self._num_drops_forgotten += job.num_drops
        del self._jobs[job_id]
        # At once, as it is opened: another job may have the id before the next step.
        self._owed.add(DropTrainer(job_id))
        self.settle()

    def checkpoint(self, job_id: str) -> Checkpoint:
        """A copy of a job after its last whole optimizer step (of one that is over, without the optimizer's state).

        Of one whose nodes each go their own way: as it was when they last met; JobError if they have not.
        """
        job = self.find(job_id)
        if job.checkpoint_step is None:
            raise JobError(f"the nodes of job {job_id!r} have not met yet: it has no state to be kept")
        if job.exchange is not None and job.exchange.common is not None:
            return job.exchange.common
        return self._copy(job)

    def _copy(self, job: Job) -> Checkpoint:
        return Checkpoint(position=job.position(), state=self._take(job, TakeCheckpoint))

    def _take(self, job: Job, kind: type[TakeCheckpoint | TakeContribution]) -> TakenCopy:
        copy = f"{job.id}/{self._num_checkpoints}"
        self._num_checkpoints += 1
        taken = TakenCopy(self._device, copy, self._send)  # first, so that the copy goes with it in any case
        self.settle()
        self._device.execute(kind(job.id, copy))
        return taken

    def contribution(self, job_id: str) -> TakenCopy:
        """What the other nodes of a job are to have, when its event says that it is due."""
        return self._take(self.find(job_id), TakeContribution)

    def combine(self, job_id: str, combination: Combination) -> None:
        """What nodes have contributed has been read: take it in, and continue (when the job runs again)."""
        exchange = self._living(job_id).exchange
        assert exchange is not None and exchange.is_waiting, f"job {job_id} waits for nothing"
        exchange.combination = combination
        self.catch_up()

    def catch_up(self) -> None:
        """Do what is owed and due."""
        self.settle()
        for job in list(self._jobs.values()):
            if job.optimizer_away and job.state == "running" and not job.memory_failures.num_turns:
                self._bring_back_optimizer(job)
            self._take_part(job)
            if job.follow_due and not job.is_terminal and not (job.exchange and job.exchange.is_waiting):
                self._follow_update(job)
            if job.answers_due and job.state == "running":
                self._follow_questions(job)
        self.settle()

    def settle(self) -> None:
        """Have the device do what is owed; one that is gone is owed nothing."""
        self._owed.settle()

    # -- packs ------------------------------------------------------------------------

    def begin(self, job_id: str) -> bool:
        """Give a job the memory of its next pack; False, and it has none, if it cannot be had now."""
        return self._packs.begin(self._jobs[job_id], self._jobs.values())

    def drop(self, job: Job) -> None:
        """Take its pack's pages; the pack comes back from the host later, or is begun again."""
        self._packs.put_away(job, self._device.clock.now())
        self.settle()

    def count_turn(self) -> None:
        """The step loop turns: those that are held back come nearer to their return."""
        self._num_turns += 1
        for job in self._jobs.values():
            job.memory_failures.note_turn()

    def _bring_back_optimizer(self, job: Job) -> None:
        try:
            self._optimizers.bring_back(job)
        except DeviceMemoryError as error:
            self._note_memory_failure(job, str(error))

    def _note_memory_failure(self, job: Job, message: str, num_rows: int | None = None) -> None:
        job.memory_failures.note_failure(num_rows)
        if job.memory_failures.too_many:
            self._fail(job, job.memory_failures.reason(message))

    # -- what a step brought ------------------------------------------------------------

    def apply(self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float) -> None:
        """Move jobs on by what has run; started_s: when the step began."""
        for job_id, seconds in shares_of_time(batch, result).items():
            self._jobs[job_id].count_seconds(started_s, **seconds)
        for update in batch.updates:
            self._book_update(self._jobs[update.job], result.norms[update.job], now_s)
        for window in batch.windows:
            self._jobs[window.job].run_window(window)
        for piece in batch.losses:
            self._jobs[piece.job].run_loss(piece)
        for tasklets in batch.tasklets:
            self._jobs[tasklets.job].run_tasklets(tasklets, result.num_tasklets[tasklets.job])
        for job_id, group in joined_jobs(batch, result).items():
            self._jobs[job_id].joined = group
        self.window_use.add(result)
        for job_id, message in result.broken.items():
            self._fail(self._jobs[job_id], message)
        for job_id in [job_id for job_id in largest_pieces(batch) if not self._jobs[job_id].is_terminal]:
            job = self._jobs[job_id]
            self._counters.charge(job.tenant, tuning=job.count_rows(now_s))
        for job_id, sums in result.packs.items():
            job = self._jobs[job_id]
            if not job.finish_pack(sums):
                continue
            if job.questions:
                job.answers_due = True
            else:
                self._finish_evaluation(job, {})
        self.catch_up()

    def recover(self, batch: StepBatch, result: StepResult, now_s: float) -> bool:
        """The device ran out of memory within the step: optimizer steps that were made stand, one that was under way
        fails its job, and packs that took part are dropped; their jobs are held back for some turns, or have failed
        if that was once too often. Returns whether any of this freed something.
        """
        assert result.failure is not None
        for job_id, norm in result.norms.items():
            self._book_update(self._jobs[job_id], norm, now_s)
        if result.failure.broken_update is not None:
            job = self._jobs[result.failure.broken_update]
            self._fail(job, f"out of memory within an optimizer step: {result.failure.message}")
        largest = largest_pieces(batch)
        moved = [job for job_id in largest if (job := self._jobs[job_id]).has_pack]
        for job in moved:
            self._packs.drop(job)
            self._note_memory_failure(job, result.failure.message, largest[job.id])
        self.catch_up()
        return bool(moved) or bool(batch.updates)

    def abandon(self, batch: StepBatch, error: BaseException) -> None:
        """The device failed: the step's packs and updates are in an unknown state. All else is as it was."""
        for update in batch.updates:
            self._fail(self._jobs[update.job], f"the device failed within an optimizer step: {error!r}")
        for job_id in largest_pieces(batch):
            if (job := self._jobs[job_id]).has_pack:
                self._packs.drop(job)
        with suppress(DeviceGoneError):  # it may not take a command any more
            self.settle()

    def _take_part(self, job: Job) -> None:
        """In the exchange with the job's other nodes: contribute what is due, and take in what has come."""
        exchange = job.exchange
        if exchange is None or job.is_terminal:
            return
        if job.gradients_due:
            self._contribute(job)
        found = exchange.combination
        if found is None or job.state != "running" or job.optimizer_away:
            return
        number = len(found.directories)
        if not exchange.shard.gives_gradients and found.version is not None and not exchange.meets:
            self._combine(job, found.num_in_version)
            number -= found.num_in_version
            if job.config.live:
                self._publish(job, transient=True, step=found.version)
        if number and not job.is_terminal:
            self._combine(job, number)
        exchange.end(found)
        if not exchange.shard.gives_gradients and exchange.meets:
            exchange.common = self._copy(job) if exchange.shard.index == 0 else None

    def _combine(self, job: Job, number: int) -> None:
        assert job.exchange is not None
        self._device.execute(CombineContributions(job.id, number, meets=job.exchange.meets))

    def _contribute(self, job: Job) -> None:
        assert job.exchange is not None
        job.exchange.begin(job.num_steps_done)
        self._tell(job, "contribution")

    def _book_update(self, job: Job, norm: float | None, now_s: float) -> None:
        self._emit(job.finish_update(norm, now_s))
        if job.error is not None:
            self._fail(job, job.error)
        elif job.exchange is not None and job.exchange.finish_update(job.num_steps_done):
            self._contribute(job)

    def _follow_update(self, job: Job) -> None:
        """What an optimizer step brings with it: a version, an evaluation (unless that was done), the next step."""
        self._adapters.versions.num_model_changes += job.costs.changes_model
        step, config = job.num_steps_done, job.config
        last = step == job.order.num_steps
        if job.exchange is not None and not job.exchange.holds_what_all_hold(step):
            pass  # nobody else has what it has now: that has no name
        elif config.live:
            self._publish(job, transient=not last)
        elif last or (config.publish_every_steps and step % config.publish_every_steps == 0):
            self._publish(job)
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
            self._fail(job, f"out of memory where {job.name}@{job.num_steps_done} was to be evaluated: {error}")
            return
        if (found := self._answers.found(job)) is not None:
            self._finish_evaluation(job, found)

    def _finish_evaluation(self, job: Job, answers: Mapping[str, float]) -> None:
        self._emit(job.finish_evaluation(self._device.clock.now(), answers))
        self._next_step(job)

    def _next_step(self, job: Job) -> None:
        """The next optimizer step, or the end."""
        if not job.start_step():
            self._end(job, "succeeded")

    def _publish(self, job: Job, *, transient: bool = False, step: int | None = None) -> None:
        """step: that nodes have made on the average, where that is not the job's own."""
        step = job.num_steps_done if step is None else step
        try:
            version = self._adapters.publish(
                job.id, job.name, step, costs=job.costs, transient=transient, model=job.model
            )
        except DeviceMemoryError as error:
            self._fail(job, f"out of memory where {job.name}@{step} was to be kept: {error}")
            return
        self._tell(job, "version", version=version.label)

    # -- endings ------------------------------------------------------------------------

    def _fail(self, job: Job, message: str) -> None:
        job.error = message
        self._end(job, "failed", message=message)

    def _end(self, job: Job, state: EventKind, *, message: str = "") -> None:
        assert state in ("succeeded", "failed", "cancelled")
        if job.state == "running":
            self._counters.leave(job.tenant)
        job.end(state)
        self._answers.cancel(job)
        self._swap.release_pack(job.id)
        self._optimizers.let_go(job)
        if not any(other.costs.other and not other.is_terminal for other in self._jobs.values()):
            self._pages.window.clear()
        self._owed.add(CloseTrainer(job.id))
        self._tell(job, state, message=message)

    def _tell(self, job: Job, kind: EventKind, *, version: str | None = None, message: str = "") -> None:
        now_s = self._device.clock.now()
        event = JobEvent(job=job.id, kind=kind, step=job.num_steps_done, now_s=now_s, version=version, message=message)
        self._emit(event)

    def _living(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job.is_terminal:
            raise JobError(f"job {job_id!r} is over: its state is {job.state}")
        return job
