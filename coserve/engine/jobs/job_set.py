"""The jobs of an engine: which there are, what their owners ask of them, and what the step loop tells them."""

from collections.abc import Callable, Collection, Iterator, Mapping

from coserve.devices.base import Device
from coserve.devices.job_messages import DropTrainer
from coserve.devices.step_messages import StepBatch, StepResult
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.jobs.answers import Answers
from coserve.engine.jobs.checkpoint import Checkpoint, TakenCopy
from coserve.engine.jobs.copies import JobCopies
from coserve.engine.jobs.endings import JobEndings
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.exchanges import JobExchange
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.memory import JobPacks
from coserve.engine.jobs.milestones import JobMilestones
from coserve.engine.jobs.optimizer_swap import OptimizerSwap
from coserve.engine.jobs.progress import JobSteps
from coserve.engine.jobs.turns import JobTurns
from coserve.engine.page_broker import PageBroker
from coserve.engine.records import WindowUse
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import DeviceMemoryError, JobError
from coserve.memory.pack_pages import PackPages
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobView
from coserve.tuning.shard import Combination


class JobSet(Mapping[str, Job]):
    """Every job that has not been forgotten, by id: what is asked and told of them; parts of it do the rest.

    A caller can be interrupted in any command to the device. So what happens is booked first, and the command stands in
    the log until it has been done (`command_log.py`); what follows from an optimizer step is due until it has followed.
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
        log: CommandLog,
        answers: Answers,
        emit: Callable[[JobEvent], None],
    ) -> None:
        """answers: to validation sets. emit: takes events."""
        self._clock, self._counters, self._log = device.clock, counters, log
        self._answers = answers
        self._jobs: dict[str, Job] = {}
        self._turns = JobTurns()
        self._num_tokens_forgotten = self._num_drops_forgotten = self._num_turns = 0
        self._optimizers = OptimizerSwap(log, pages, swap, latency)
        self._copies = JobCopies(device, log)
        self._endings = JobEndings(
            device.clock,
            pages,
            swap,
            counters,
            log=log,
            optimizers=self._optimizers,
            answers=answers,
            emit=emit,
            jobs=self._jobs,
        )
        self._packs = JobPacks(
            log,
            pages,
            swap,
            on_drop=lambda job: emit(job.event("pack_dropped", device.clock.now())),
            on_memory_error=self._endings.note_memory_failure,
        )
        self._milestones = JobMilestones(device, adapters, answers, self._endings, emit)
        self._exchange = JobExchange(device.clock, log, self._copies, self._milestones, self._endings, emit)
        self._steps = JobSteps(
            self._jobs,
            self._packs,
            counters,
            endings=self._endings,
            milestones=self._milestones,
            exchange=self._exchange,
            emit=emit,
        )

    # -- questions ----------------------------------------------------------------

    def __getitem__(self, job_id: str) -> Job:
        return self._jobs[job_id]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

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
        return sum([job.state == "running" for job in self._jobs.values()])

    @property
    def tenants(self) -> set[str]:
        """Tenants with jobs that are neither over nor paused."""
        return {job.tenant for job in self._jobs.values() if job.state == "running"}

    @property
    def num_tokens_trained(self) -> int:
        """Rows of packs whose gradients are in, of all jobs here."""
        return self._num_tokens_forgotten + sum([job.num_tokens_trained for job in self._jobs.values()])

    @property
    def num_packs_dropped(self) -> int:
        return self._num_drops_forgotten + sum(job.num_drops for job in self._jobs.values())

    @property
    def window_use(self) -> WindowUse:
        """What came of the window of weights so far."""
        return self._steps.window_use

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Jobs that run whose last tasklets were one batch of rows."""
        running = {job.id for job in self._jobs.values() if job.state == "running"}
        groups = {tuple(sorted(self._jobs[job].joined & running)) for job in running}
        return tuple(sorted(group for group in groups if len(group) > 1))

    @property
    def packs(self) -> list[PackPages]:
        """Pages of the packs in memory."""
        return [job.packs.pages for job in self._jobs.values() if job.packs.pages is not None]

    @property
    def with_optimizer(self) -> list[str]:
        """Ids of jobs whose optimizers are on the device, or will be."""
        return [job.id for job in self._jobs.values() if not (job.is_terminal or job.optimizer_away)]

    @property
    def on_host(self) -> list[HostOwner]:
        """What they have there."""
        packs: list[HostOwner] = [("pack", job.id) for job in self._jobs.values() if job.packs.swapped]
        return [*packs, *[("optimizer", job.id) for job in self._jobs.values() if job.optimizer_away]]

    def views(self, now_s: float, *, without: Collection[str] = ()) -> tuple[JobView, ...]:
        """Jobs that could do something, the one that has been served least first; without those that are held back, or
        whose optimizer is not back from the host.

        Where some are to be alone, they and all others take turns.
        """
        jobs = [job for job in self._jobs.values() if job.state == "running"]
        found: list[JobView] = []
        is_one_alone = False
        for job in jobs:
            if job.optimizer_away or job.memory_failures.num_turns or job.id in without:
                continue
            if not self._optimizers.is_ready(job) and job.update_due:
                continue  # others have the pages of its moments
            is_one_alone |= job.is_alone
            if (view := job.view(now_s, self._packs.num_pages(job))) is not None:
                found.append(view)
        served = self._turns.served(jobs, [view.id for view in found])
        if len(found) > 1:
            found.sort(key=lambda view: served[view.id])
        return self._in_turn(tuple(found)) if is_one_alone else tuple(found)

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

    def add(self, job: Job) -> None:
        """It has been opened (`JobOpener`), and runs from now on."""
        self._num_tokens_forgotten -= job.num_tokens_trained  # of one that is resumed: another engine's
        self._jobs[job.id] = job
        self._milestones.note_change(job)  # to what it resumes from
        self._counters.arrive(job.tenant)
        self._milestones.serve_again(job)
        self._optimizers.place(job)
        self.catch_up()

    def pause(self, job_id: str) -> None:
        """Let it rest where it is; its pack goes to the host, or goes, and is begun again later; its optimizer goes to
        the host, or stays.
        """
        job = self._living(job_id)
        if job.has_pack:
            self._packs.put_away(job, self._clock.now())
        if job.state == "running":
            self._counters.leave(job.tenant)
        job.state = "paused"
        self._answers.cancel(job)
        self._optimizers.put_away(job)
        self._log.flush()

    def resume(self, job_id: str) -> None:
        """The inverse."""
        job = self._living(job_id)
        if job.state == "paused":
            self._counters.arrive(job.tenant)
        job.state = "running"

    def cancel(self, job_id: str) -> None:
        """End it at once; versions that it has published stay."""
        self._endings.end(self._living(job_id), "cancelled")
        self._log.flush()

    def forget(self, job_id: str) -> None:
        """Let go of a job that is over; versions that it has published stay."""
        job = self.find(job_id)
        if not job.is_terminal:
            raise JobError(f"job {job_id!r} is {job.state}: cancel it first")
        self._num_tokens_forgotten += job.num_tokens_trained
        self._num_drops_forgotten += job.num_drops
        del self._jobs[job_id]
        self._log.send(DropTrainer(job_id))
        self._log.flush()

    def checkpoint(self, job_id: str) -> Checkpoint:
        """A copy of a job after its last whole optimizer step (of one that is over, without the optimizer's state).

        Of one whose nodes each go their own way: as it was when they last met; JobError if they have not.
        """
        return self._copies.checkpoint(self.find(job_id))

    def contribution(self, job_id: str) -> TakenCopy:
        """What the other nodes of a job are to have, when its event says that it is due."""
        return self._copies.contribution(self.find(job_id))

    def combine(self, job_id: str, combination: Combination) -> None:
        """What nodes have contributed has been read: take it in, and continue (when the job runs again)."""
        exchange = self._living(job_id).exchange
        assert exchange is not None and exchange.is_waiting, f"job {job_id} waits for nothing"
        exchange.arrive(combination)
        self.catch_up()

    def catch_up(self) -> None:
        """Do what is due."""
        for job in list(self._jobs.values()):
            if job.optimizer_away and job.state == "running" and not job.memory_failures.num_turns:
                self._bring_back_optimizer(job)
            if job.state == "running" and not job.optimizer_away:
                self._place_moments(job)
            if job.exchange is not None:
                self._exchange.take_part(job)
            if job.follow_due or job.answers_due:
                self._milestones.follow(job)
            self._optimizers.hold(job)

    # -- packs ------------------------------------------------------------------------

    def begin(self, job_id: str) -> bool:
        """Give a job the memory of its next pack, and of its moments if those need pages; False, and it has no pack, if
        it cannot be had now.
        """
        job = self._jobs[job_id]
        self._optimizers.hold(job, for_pack=True)
        try:
            return self._packs.begin(job, self._jobs.values())
        finally:
            self._optimizers.hold(job)

    def drop(self, job: Job) -> None:
        """Take its pack's pages; the pack comes back from the host later, or is begun again."""
        self._packs.put_away(job, self._clock.now())
        self._optimizers.hold(job)

    def count_turn(self) -> None:
        """The step loop turns: those that are held back come nearer to their return."""
        self._num_turns += 1
        for job in self._jobs.values():
            if job.memory_failures.num_turns:
                job.memory_failures.note_turn()

    def _place_moments(self, job: Job) -> None:
        if job.follow_due or (not self._optimizers.is_ready(job) and job.update_due):
            self._optimizers.place(job)

    def _bring_back_optimizer(self, job: Job) -> None:
        try:
            self._optimizers.bring_back(job)
        except DeviceMemoryError as error:
            self._endings.note_memory_failure(job, str(error))

    # -- what a step brought ------------------------------------------------------------

    def apply(self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float) -> None:
        """Move jobs on by what has run; started_s: when the step began."""
        self._steps.apply(batch, result, started_s=started_s, now_s=now_s)
        self.catch_up()

    def recover(self, batch: StepBatch, result: StepResult, now_s: float) -> bool:
        """The device ran out of memory within the step: optimizer steps that were made stand, one that was under way
        fails its job, and packs that took part are dropped; their jobs are held back for some turns, or have failed
        if that was once too often. Returns whether any of this freed something.
        """
        freed = self._steps.recover(batch, result, now_s)
        self.catch_up()
        return freed

    def abandon(self, batch: StepBatch, error: BaseException) -> None:
        """The device failed: the step's packs and updates are in an unknown state. All else is as it was."""
        self._steps.abandon(batch, error)

    def _living(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job.is_terminal:
            raise JobError(f"job {job_id!r} is over: its state is {job.state}")
        return job
