"""The jobs of an engine: which there are, their owners' commands, and the step loop's results."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from coserve.devices.base import Device
from coserve.devices.messages.jobs import DropTrainer
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.jobs.answers import Answers
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.lifecycle import JobLifecycle
from coserve.engine.jobs.memory import JobMemory
from coserve.engine.page_manager import PageManager
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import DeviceMemoryError, JobError
from coserve.memory.pages.pack_pages import PackPages
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress
from coserve.tuning.shard import Combination


class ServedRows:
    """Rows that count as served to each running job, by which jobs take turns.

    As in start-time fair queueing, a job that comes or is resumed starts level with the one served
    least among those that have work: it neither catches up on what others had before, nor waits for
    what it had. The same holds for one that had no work for a while.
    """

    def __init__(self) -> None:
        # Rows that count as served to running jobs beside those that they have run.
        self._lifts: dict[str, float] = {}
        self._working: frozenset[str] = frozenset()

    def of(self, jobs: Sequence[Job], working: Collection[str]) -> dict[str, float]:
        """Return the rows that count for each job.

        Args:
            jobs: All running jobs.
            working: Ids of those that have work.
        """
        if len(jobs) == 1:  # a single job takes no turns
            (job,) = jobs
            lift = self._lifts.get(job.id, 0.0)
            self._lifts, self._working = {job.id: lift}, frozenset(working)
            return {job.id: job.num_rows_run + lift}
        # Only jobs that were running at the last call have a lift; all others are new or resumed.
        served = {
            job.id: job.num_rows_run + self._lifts[job.id] for job in jobs if job.id in self._lifts
        }
        # Jobs with work then and now set the level; an idle one would hold it down.
        others = [served[id] for id in working if id in served and id in self._working]
        least = min(others, default=None)
        for job in jobs:
            if job.id not in served:
                # New or resumed: the job starts level.
                served[job.id] = job.num_rows_run if least is None else least
            # Back after a time without work: the job is lifted to the level, and never lowered.
            elif least is not None and job.id in working and job.id not in self._working:
                served[job.id] = max(served[job.id], least)
        # Rebuilt from running jobs alone, so a paused job loses its lift and is new when resumed.
        self._lifts = {job.id: served[job.id] - job.num_rows_run for job in jobs}
        self._working = frozenset(working)
        return served


class JobSet(Mapping[str, Job]):
    """Every job that has not been forgotten, by id.

    `lifecycle.py` advances jobs, and `memory.py` gives them memory. A caller can be interrupted in
    any command to the device. So what happens is booked first, and the command stays in the log
    until it has been done (`command_log.py`); what follows from an optimizer step, or from an end,
    is due until it has been done.
    """

    def __init__(
        self,
        device: Device,
        pages: PageManager,
        swap: HostSwap,
        adapters: ServedAdapters,
        counters: TokenCounters,
        latency: LatencyModel,
        *,
        log: CommandLog,
        answers: Answers,
        emit: Callable[[JobEvent], None],
    ) -> None:
        """Begin without jobs.

        Args:
            answers: Answers to validation sets.
            emit: Takes events.
        """
        self._counters, self._log, self._answers = counters, log, answers
        self._jobs: dict[str, Job] = {}
        self._served = ServedRows()
        self._num_tokens_forgotten = self._num_drops_forgotten = self._num_turns = 0
        self._memory = JobMemory(device.clock, log, pages, swap, latency, emit)
        self.lifecycle = JobLifecycle(
            device, self._memory, adapters, counters, log=log, answers=answers, emit=emit, jobs=self
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
        """Return a job.

        Raises:
            JobError: there is none of this id.
        """
        if job_id not in self._jobs:
            raise JobError(
                f"there is no job {job_id!r}; there are: {', '.join(self._jobs) or 'none'}"
            )
        return self._jobs[job_id]

    @property
    def num_running(self) -> int:
        """Return the number of jobs that are neither over nor paused."""
        return sum([job.progress.status == "running" for job in self._jobs.values()])

    @property
    def tenants(self) -> set[str]:
        """Return the tenants with jobs that are neither over nor paused."""
        return {job.tenant for job in self._jobs.values() if job.progress.status == "running"}

    @property
    def num_tokens_trained(self) -> int:
        """Return the number of tokens in packs whose gradients were added, of all jobs here."""
        return self._num_tokens_forgotten + sum(
            [job.num_tokens_trained for job in self._jobs.values()]
        )

    @property
    def num_packs_dropped(self) -> int:
        return self._num_drops_forgotten + sum(
            job.progress.num_drops for job in self._jobs.values()
        )

    @property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of running jobs whose last tasklets were one batch of rows."""
        running = {job.id for job in self._jobs.values() if job.state == "running"}
        groups = {tuple(sorted(self._jobs[job].progress.joined & running)) for job in running}
        return tuple(sorted(group for group in groups if len(group) > 1))

    @property
    def packs(self) -> list[PackPages]:
        """Return the pages of the packs in memory."""
        return [
            begun.pages for job in self._jobs.values() if (begun := job.progress.begun) is not None
        ]

    @property
    def with_optimizer(self) -> list[str]:
        """Return the ids of jobs whose optimizers are on the device, or will be."""
        return [
            job.id for job in self._jobs.values() if not (job.is_terminal or job.optimizer_away)
        ]

    @property
    def on_host(self) -> list[HostOwner]:
        """Return what jobs have on the host, as owners of host memory."""
        packs: list[HostOwner] = [
            ("pack", job.id) for job in self._jobs.values() if job.progress.swapped
        ]
        return [
            *packs,
            *[("optimizer", job.id) for job in self._jobs.values() if job.optimizer_away],
        ]

    def progress(self, now_s: float, *, without: Collection[str] = ()) -> tuple[JobProgress, ...]:
        """Return a policy's view of the jobs that could do something, the one served least first;
        without those that are held back, or whose optimizer is on the host.

        Where some are to be alone, they and all others take turns.
        """
        jobs = [job for job in self._jobs.values() if job.progress.status == "running"]
        views: list[JobProgress] = []
        is_one_alone = False
        for job in jobs:
            progress = job.progress
            if progress.optimizer_away or progress.memory_failures.num_turns or job.id in without:
                continue
            if not self._memory.has_moments(job) and progress.update_due:
                continue  # others have the pages of its moments
            is_one_alone |= progress.num_steps_done < job.alone_until_step
            if (view := job.view(now_s, self._memory.num_pack_pages(job))) is not None:
                views.append(view)
        served = self._served.of(jobs, [each.id for each in views])
        if len(views) > 1:
            views.sort(key=lambda each: served[each.id])
        return self._in_turn(tuple(views)) if is_one_alone else tuple(views)

    def _in_turn(self, views: tuple[JobProgress, ...]) -> tuple[JobProgress, ...]:
        """Return one of the jobs that are to be alone, or all others, in turn."""
        alone = sorted(each.id for each in views if self._jobs[each.id].is_alone)
        groups = [[id] for id in alone]
        if others := [each.id for each in views if each.id not in alone]:
            groups.append(others)
        if not groups:
            return ()
        # One group for each turn of the step loop.
        chosen = groups[self._num_turns % len(groups)]
        return tuple([each for each in views if each.id in chosen])

    # -- life -----------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Add a job that has been opened (`JobOpener`): it runs from now on."""
        # Tokens of a resumed job were trained by another engine.
        self._num_tokens_forgotten -= job.num_tokens_trained
        self._jobs[job.id] = job
        self.lifecycle.note_change(job)  # its values are those that it resumes from
        self._counters.arrive(job.tenant, job.queue_item)
        self.lifecycle.serve_again(job)
        self._memory.place_moments(job)
        self.catch_up()

    def pause(self, job_id: str) -> None:
        """Pause a job: its pack goes to the host, or is discarded and restarted on resume; its
        optimizer goes to the host, or stays.
        """
        job = self._living(job_id)
        # Before the status changes: a paused job has no view, and its pack would always be dropped.
        if job.has_pack:
            self._memory.put_pack_away(job)
        job.set_status("paused")
        self._counters.leave(job.tenant, job.queue_item)
        self._answers.cancel(job)
        self._memory.put_moments_away(job)
        # At once, since no step may follow.
        self._log.flush()

    def resume(self, job_id: str) -> None:
        """Resume a paused job."""
        job = self._living(job_id)
        job.set_status("running")
        self._counters.arrive(job.tenant, job.queue_item)

    def cancel(self, job_id: str) -> None:
        """End a job at once; versions that it has published stay."""
        self.lifecycle.end(self._living(job_id), "cancelled")
        self._log.flush()

    def forget(self, job_id: str) -> None:
        """Forget a job that is over; versions that it has published stay.

        Raises:
            JobError: the job is not over, or there is none of this id.
        """
        job = self.find(job_id)
        if not job.is_terminal:
            raise JobError(f"job {job_id!r} is {job.state}: cancel it first")
        # If the end was interrupted, what the job holds is given back first.
        self.lifecycle.follow_end(job)
        # The engine's totals outlive the job.
        self._num_tokens_forgotten += job.num_tokens_trained
        self._num_drops_forgotten += job.progress.num_drops
        del self._jobs[job_id]
        self._log.send(DropTrainer(job_id))
        self._log.flush()

    def combine(self, job_id: str, combination: Combination) -> None:
        """Apply the contributions of a job's nodes, which have been read, and continue (when it
        runs again).
        """
        job = self._living(job_id)
        exchange = job.exchange
        assert exchange is not None and exchange.is_waiting, f"job {job_id} waits for nothing"
        job.set_exchange(exchange.arrive(combination))
        self.catch_up()

    def catch_up(self) -> None:
        """Do what is due for all jobs."""
        for job in list(self._jobs.values()):
            progress = job.progress
            if progress.is_terminal:
                self.lifecycle.follow_end(job)
                continue
            # For most jobs nothing is due in most steps.
            if progress.optimizer_away or progress.exchange is not None or not progress.packs:
                if progress.status == "running":
                    self._place_moments(job)
                self.lifecycle.follow(job)
            self._memory.hold_moments(job)

    def _place_moments(self, job: Job) -> None:
        """Have a job's moments where a step can use them, if there is room now."""
        if job.optimizer_away and not job.progress.memory_failures.num_turns:
            try:
                self._memory.bring_moments_back(job)
            except DeviceMemoryError as error:
                self.lifecycle.hold_back(job, str(error))
        if job.optimizer_away:
            return
        # Moments exist from the first step on; those that need pages get them before a step.
        if job.progress.stage == "after_step" or (
            job.update_due and not self._memory.has_moments(job)
        ):
            self._memory.place_moments(job)

    # -- steps ------------------------------------------------------------------------

    def begin(self, job_id: str) -> bool:
        """Allocate the memory of a job's next pack, and of its moments if those need pages. Returns
        False if it cannot be had now.
        """
        job = self._jobs[job_id]
        # Held meanwhile: making room for the pack must not take the moments that it needs.
        self._memory.hold_moments(job, for_pack=True)
        try:
            return self._memory.begin_pack(job, self._jobs.values())
        except DeviceMemoryError as error:
            self.lifecycle.hold_back(job, str(error))
            return False
        finally:
            self._memory.hold_moments(job)

    def drop(self, job: Job) -> None:
        """Take the pages of a job's pack, which comes back from the host later, or is restarted."""
        self._memory.put_pack_away(job)
        self._memory.hold_moments(job)

    def count_turn(self) -> None:
        """Count a turn of the step loop, after which jobs that are held back come closer to their
        return.
        """
        self._num_turns += 1
        for job in self._jobs.values():
            failures = job.progress.memory_failures
            if failures.num_turns:
                job.set_memory_failures(failures.after_turn())

    def apply(
        self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float
    ) -> None:
        """Apply the result of a step to its jobs, and do what is due. started_s: when the step
        began.
        """
        self.lifecycle.apply(batch, result, started_s=started_s, now_s=now_s)
        self.catch_up()

    def recover(self, batch: StepBatch, result: StepResult, now_s: float) -> bool:
        """Apply a step that ran out of memory. Returns whether jobs have given anything back."""
        freed = self.lifecycle.recover(batch, result, now_s)
        self.catch_up()
        return freed

    def _living(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job.is_terminal:
            raise JobError(f"job {job_id!r} is over: its state is {job.state}")
        return job
