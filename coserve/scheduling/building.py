"""Plans built piece by piece, the part that policies share: a policy sets the time, the builder
finds what fits. `step_time.py` adds up the predicted time.
"""

from collections.abc import Callable, Sequence
from math import inf

from msgspec import structs

from coserve.scheduling.fusion import (
    hybrid_tasks,
    is_before_backward,
    joined_tasklets,
    least_advanced,
    tasklet_rows,
)
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.order import by_due
from coserve.scheduling.pieces import (
    CLEARLY,
    MAX_ROW_COST,
    largest_that_fits,
    least_urgent,
    rows_of_tile,
)
from coserve.scheduling.plan import (
    JobProgress,
    Plan,
    PlannedLoss,
    PlannedRows,
    PlannedTasklets,
    RequestProgress,
    View,
)
from coserve.scheduling.slo.deadlines import SURE_MARGINS
from coserve.scheduling.step_time import StepTime

# The smallest window of a job, or piece of its loss, unless it is all that is left, or a forward
# pass may not have as many rows.
MIN_WINDOW_ROWS = 16
# Where a piece of a loss ends before the last row, its rows are a multiple of this: libraries
# compile a product for each number of rows, which takes a tenth of the loss of 128 rows over a
# large vocabulary, and cut it into tiles.
LOSS_ROWS_STEP = 32
# A window or piece of a loss may cost up to `MAX_ROW_COST` times as much per row as one of this
# many rows. A dearer one waits, where it can, until more time has been saved up.
GOOD_ROWS = 256


class PlanBuilder:
    """A plan that grows, with the predicted time so far."""

    def __init__(self, view: View, latency: LatencyModel, memory: MemoryPlan | None = None) -> None:
        """Begin an empty plan.

        Args:
            memory: Pages that change hands before the step; packs may begin in it until the plan is
                built.
        """
        self._latency, self._max_rows, self._memory = latency, view.max_rows, memory
        self._begins = False
        self._time = StepTime(overhead_s=latency.overhead.seconds(begins=False))
        self._load = ForwardLoad()
        self._rows: list[PlannedRows] = []
        self._losses: list[PlannedLoss] = []
        self._tasklets: list[PlannedTasklets] = []
        self._updates: list[str] = []
        # Sums over decoding requests, for `Prediction.decode_share`.
        self._decode_share, self._num_decoding, self._paces = 0.0, 0, 0.0
        self._loss_rows = 0

    @property
    def seconds(self) -> float:
        """Return the time of the plan with one piece after the other on the whole device."""
        self._count_overhead()
        return self._time.whole_s

    @property
    def forward_s(self) -> float:
        """Return the time of its forward pass on the whole device."""
        return self._time.forward_s

    @property
    def step_s(self) -> float:
        """Return the time of the step, divided as planned."""
        self._count_overhead()
        return self._time.step_s

    @property
    def runs_nothing(self) -> bool:
        """Return whether there is no step to run so far."""
        return not (self._rows or self._losses or self._tasklets or self._updates)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of its forward pass."""
        return self._load.rows

    def build(self) -> Plan:
        """Return the finished plan."""
        if not (self._losses or self._tasklets):  # nothing fitted
            self._time.divide(None)
        self._count_overhead()
        time, memory = self._time, self._memory
        return Plan(
            preempt=tuple(memory.preempt) if memory else (),
            drop=tuple(memory.drop) if memory else (),
            admit=tuple(memory.admit) if memory else (),
            begin=tuple(memory.begin) if memory else (),
            rows=tuple(self._rows),
            losses=tuple(self._losses),
            tasklets=tuple(self._tasklets),
            updates=tuple(self._updates),
            backward_limit_s=time.backward_limit_s() if self._tasklets else None,
            partition=time.partition,
            prediction=time.prediction(
                forward_correction=self._latency.forward_correction(self._load),
                decode_share=self._decode_share,
            ),
        )

    def _count_overhead(self) -> None:
        """Update the overhead: packs may have begun since it was counted."""
        if self._memory is not None and self._memory.begin and not self._begins:
            self._begins = True
            self._time.overhead_s = self._latency.overhead.seconds(begins=True)

    def decode(self, requests: Sequence[RequestProgress]) -> None:
        """Add one row for each request; if that is too many, for those that have waited longest."""
        if not requests:
            return
        room = self._max_rows - self._load.rows
        requests = (
            requests
            if len(requests) <= room
            else sorted(requests, key=lambda each: each.last_token_s)[:room]
        )
        self._paces += self._load.add_decodes(requests)
        self._rows += [
            PlannedRows(request.id, "decode", request.num_past, 1) for request in requests
        ]
        self._time.forward_s = self._latency.forward_s(self._load)
        self._num_decoding += len(requests)
        # Mean over the requests of the time of a decode step divided by their TPOT.
        self._decode_share = (
            (self._time.overhead_s + self._time.forward_s) * self._paces / self._num_decoding
        )

    def decode_seconds(self, requests: Sequence[RequestProgress]) -> Callable[[int], float]:
        """Return a function from a number to the time of the forward pass with one row of each of
        the first of these requests.
        """
        return self._latency.with_decodes(self._load, requests)

    def prefill(
        self,
        requests: Sequence[RequestProgress],
        budget_s: float,
        *,
        urgent: bool = True,
        stretch: float = 1.0,
    ) -> bool:
        """Add tokens of prompts, in this order, as many as the time allows. Returns whether all are
        in.

        Args:
            budget_s: Seconds from the step's start to the end of the forward pass.
            urgent: Whether the first prompt gets its smallest piece in any case.
            stretch: Factor on the budget for a prompt that ends with this step.
        """
        self._count_overhead()
        budget_s -= self._time.overhead_s
        for index, request in enumerate(requests):
            longest = min(request.num_rows, self._max_rows - self._load.rows)
            must = urgent and index == 0
            if longest < 1:
                return False
            seconds = self._latency.with_request(self._load, request)
            others = self._load.rows
            least = (
                least_urgent(seconds, longest, others)
                if must
                else min(longest, rows_of_tile(others))
            )
            # No prompt overtakes the one before it.
            if not must and seconds(least) > budget_s:
                return False
            # A prompt that ends with this step may exceed the budget (`WHOLE_STRETCH`).
            ends = request.num_rows == longest and seconds(longest) <= stretch * budget_s
            rows = longest if ends else largest_that_fits(least, longest, seconds, budget_s)
            self._load.add_request(request, rows)
            self._rows.append(PlannedRows(request.id, "prefill", request.num_past, rows))
            before_s, self._time.forward_s = (
                self._time.forward_s,
                self._latency.forward_s(self._load),
            )
            self._time.prefill_s += self._time.forward_s - before_s
            if rows < request.num_rows:
                return False
        return True

    def batch(self, requests: Sequence[RequestProgress], until_s: float, *, must: bool) -> None:
        """Add rows of batch work, as many as end by `until_s`, once all other requests have their
        rows.

        First come tokens of sequences that decode, those first that have waited longest, then
        prompts, those first that are due first.

        Args:
            until_s: Seconds from the step's start.
            must: Whether the smallest piece is added in any case.
        """
        self._count_overhead()
        before_s, prefill_s = self._time.forward_s, self._time.prefill_s
        decoding = sorted(
            [each for each in requests if each.num_rows == 1], key=lambda each: each.last_token_s
        )
        most = min(len(decoding), self._max_rows - self._load.rows)
        if most > 0:
            seconds = self._latency.with_decodes(self._load, decoding)
            left_s = until_s - self._time.overhead_s
            fits = seconds(1) <= left_s
            chosen = decoding[: largest_that_fits(1, most, seconds, left_s)] if fits or must else []
            self._load.add_decodes(chosen)
            self._rows += [PlannedRows(each.id, "decode", each.num_past, 1) for each in chosen]
            self._time.forward_s = self._latency.forward_s(self._load)
            must = must and not chosen
        prompts = [each for each in requests if each.num_rows > 1]
        self.prefill(by_due(prompts), until_s, urgent=must)
        self._time.batch_s += self._time.forward_s - before_s
        # Prompts of batch work count as batch work alone.
        self._time.prefill_s = prefill_s

    def divide(self, jobs: Sequence[JobProgress], until_s: float) -> None:
        """Run the plan's tasklets beside its forward pass, where that is predicted to get more done
        by `until_s`. To be called once all requests have their rows, with the jobs that will be
        served.

        The device is divided only if the first job goes backward, and has tasklets for as long as
        the forward pass lasts: windows, the loss and small rests gain most from taking turns.
        """
        if not self._rows or not jobs or jobs[0].phase != "backward":
            return
        self._count_overhead()
        job, forward_s = jobs[0], self._time.forward_s
        division = self._latency.sharing.best(
            forward_rows=self._load.rows,
            tasklet_rows=job.num_rows_left,
            most_stretch=(until_s - self._time.overhead_s) / forward_s if forward_s else inf,
            margin=SURE_MARGINS * self._latency.corrections.margin,
        )
        if division is None:
            return
        _, forward_speed, backward_speed = division
        # What the job has left: the rest of its current part, then whole parts.
        left_s = self._latency.tasklet_s(job, job.num_rows_left)
        left_s += (job.num_parts_left - 1) * self._latency.tasklet_s(job, job.num_rows)
        # Only if the tasklets last as long as the forward pass does on its side.
        if backward_speed * forward_s / forward_speed <= left_s:
            self._time.divide(*division)

    def tune(
        self,
        jobs: Sequence[JobProgress],
        until_s: float,
        *,
        max_defer_s: float = 0.0,
        least_share: float = 0.0,
    ) -> None:
        """Add for each job in turn the largest piece of its current phase that fits into the
        remaining time; losses and tasklets with all others of its hybrid task
        (`scheduling.fusion`).

        A device that has nothing else to do runs the smallest step there is, whatever the time: no
        later one would have more.

        Args:
            jobs: Jobs in the order in which they are served.
            until_s: Seconds from the step's start to its end, at the latest.
            max_defer_s: Seconds that a piece which costs too much per row may wait for a step with
                more time.
            least_share: Share of the time that jobs get in any case: a job that has waited long
                enough for its smallest piece to be no more gets it.
        """
        self._count_overhead()
        self._time.allow_until(until_s)
        tasks, members = self._hybrid_tasks(jobs)
        forward: set[int] = set()  # hybrid tasks of jobs that get on with their forward pass
        for job in jobs:
            left_s = until_s - self.step_s
            if left_s <= 0:
                break
            if job.phase == "update":
                self._update(job, left_s)
            # A divided step runs neither windows nor losses (see `divide`).
            elif job.phase == "forward" and self._time.partition is None:
                if self._window(job, left_s, may_wait=job.waited_s < max_defer_s):
                    forward.add(tasks[job.id])
            elif self._time.partition is None or job.phase == "backward":
                # A job that was served more waits at the loss for jobs of its hybrid task that were
                # served less.
                if tasks[job.id] in forward and is_before_backward(job):
                    continue
                # The first member's turn is that of its whole hybrid task.
                if together := members.pop(tasks[job.id], None):
                    self._together(together, until_s, max_defer_s=max_defer_s)
        if least_share:
            self._age(jobs, least_share)
        if jobs and self.runs_nothing:
            self._least(jobs[0])

    def _hybrid_tasks(
        self, jobs: Sequence[JobProgress]
    ) -> tuple[dict[str, int], dict[int, list[JobProgress]]]:
        """Return the hybrid task of each job, and the jobs of each that could go through the loss
        or backward now; beside a forward pass none goes through the loss.
        """
        tasks = {job.id: 0 for job in jobs}
        if len(jobs) > 1 and any(job.phase in ("loss", "backward") for job in jobs):
            tasks |= hybrid_tasks(jobs, self._latency, max_rows=self._max_rows)
        members: dict[int, list[JobProgress]] = {}
        for job in jobs:
            if job.phase == "backward" or (job.phase == "loss" and self._time.partition is None):
                members.setdefault(tasks[job.id], []).append(job)
        return tasks, members

    def take(self, job: JobProgress, rows: int, num_tasklets: int = 1) -> None:
        """Add a piece of the job's current phase, whatever its time.

        It is no smaller than the smallest piece. Nothing is added if the forward pass has no room
        for that.

        Args:
            rows: Maximum number of rows.
            num_tasklets: Maximum number of tasklets of as many rows.
        """
        rows = min(job.num_rows_left, max(rows, MIN_WINDOW_ROWS))
        if job.phase == "update":
            self._update(job, inf)
        elif job.phase == "loss":
            self._add_loss(job, rows)
        elif job.phase == "forward":
            room = self._max_rows - self._load.rows
            if room >= min(rows, MIN_WINDOW_ROWS, self._max_rows):
                self._add_window(job, min(rows, room))
        elif num_tasklets:
            rows = min(job.num_rows, max(rows, MIN_WINDOW_ROWS))
            windows = tasklet_rows(job, rows, num_tasklets)
            seconds = {size: self._latency.tasklet_s(job, size) for size in set(windows)}
            self._tasklets.append(PlannedTasklets(job.id, rows, len(windows)))
            self._time.backward_s += sum([seconds[size] for size in windows])
            self._time.longest_tasklet_s = max(self._time.longest_tasklet_s, *seconds.values())

    def _age(self, jobs: Sequence[JobProgress], least_share: float) -> None:
        """Add the smallest piece of the job that has waited longest, if that is long enough."""
        oldest = max(jobs, key=lambda job: job.waited_s, default=None)
        if oldest is None or not oldest.waited_s or oldest.id in self.served_jobs:
            return
        # Each of the jobs may claim as much, so together they stay within the share.
        if self.piece_s(oldest, MIN_WINDOW_ROWS) * len(jobs) <= least_share * oldest.waited_s:
            self._least(oldest)

    def piece_s(self, job: JobProgress, rows: int) -> float:
        """Return the seconds that a piece of at most as many rows would add to the step; inf
        without room for it.
        """
        rows = min(job.num_rows_left, rows)
        if job.phase == "update":
            return self._latency.update_s(job.info.counts)
        if job.phase == "backward":
            return self._latency.tasklet_s(job, rows)
        if job.phase == "loss":
            return self._latency.loss_s(rows)
        if self._load.rows + rows > self._max_rows:
            return inf
        return self._latency.with_window(self._load, job)(rows) - self._time.forward_s

    @property
    def served_jobs(self) -> set[str]:
        """Return the jobs that have a piece in the plan."""
        windows = [rows.item for rows in self._rows if rows.kind == "window"]
        losses, tasklets = (
            [piece.job for piece in self._losses],
            [part.job for part in self._tasklets],
        )
        return {*windows, *losses, *tasklets, *self._updates}

    def _least(self, job: JobProgress) -> None:
        """Add the smallest piece of a job."""
        rows = min(job.num_rows_left, MIN_WINDOW_ROWS)
        if job.phase == "update":
            self._update(job, inf)
        elif job.phase == "backward":
            seconds = self._latency.tasklet_s(job, rows)
            self._tasklets.append(PlannedTasklets(job.id, rows, 1))
            self._time.backward_s += seconds
            self._time.longest_tasklet_s = max(self._time.longest_tasklet_s, seconds)
        elif job.phase == "loss":
            self._add_loss(job, rows)
        else:
            self._add_window(job, min(rows, self._max_rows))

    def _update(self, job: JobProgress, left_s: float) -> None:
        seconds = self._latency.update_s(job.info.counts)
        if seconds <= left_s:
            self._updates.append(job.id)
            self._time.update_s += seconds

    def _together(self, jobs: Sequence[JobProgress], until_s: float, *, max_defer_s: float) -> None:
        """Add work of the jobs of a hybrid task: what is left of their losses as far as it fits,
        then tasklets of all that can join.
        """
        going = []
        for job in jobs:
            if job.phase == "backward":
                going.append(job)
            elif self._loss(job, until_s - self.step_s, may_wait=job.waited_s < max_defer_s):
                # The loss is complete with this piece, so tasklets can follow in the same step.
                going.append(structs.replace(job, phase="backward", num_rows_left=job.num_rows))
        # Batches of jobs at the same part, the least advanced first, until each job had its turn.
        while going:
            joined = least_advanced(going) if len(going) > 1 else going
            going = [job for job in going if job not in joined]
            self._backward(joined, self._time.left_s(until_s))

    def _backward(self, jobs: Sequence[JobProgress], left_s: float) -> None:
        if left_s <= 0:
            return
        # The number of tasklets so far is a group number that no other batch has.
        joined = joined_tasklets(jobs, left_s, self._latency, group=len(self._tasklets))
        if joined is None and len(jobs) > 1:  # one alone may fit: the one that is least advanced
            alone = max(
                jobs,
                key=lambda job: (job.num_parts_left - job.info.counts.num_parts, job.num_rows_left),
            )
            joined = joined_tasklets([alone], left_s, self._latency, group=0)
        if joined is not None:
            self._tasklets += joined.tasklets
            self._time.backward_s += joined.seconds
            self._time.longest_tasklet_s = max(self._time.longest_tasklet_s, joined.longest_s)

    def _loss(self, job: JobProgress, left_s: float, *, may_wait: bool) -> bool:
        """Add as many rows as fit. Returns whether tasklets can follow."""
        longest = job.num_rows_left
        least = min(longest, MIN_WINDOW_ROWS)
        if self._more_loss_s(least) > left_s:
            return False
        rows = largest_that_fits(least, longest, self._more_loss_s, left_s)
        if LOSS_ROWS_STEP < rows < longest:
            rows -= rows % LOSS_ROWS_STEP
        # A small piece that costs too much per row waits for a step with more time.
        good = min(longest, GOOD_ROWS)
        if (
            may_wait
            and rows < good
            and self._more_loss_s(rows) / rows > MAX_ROW_COST * self._more_loss_s(good) / good
        ):
            return False
        self._add_loss(job, rows)
        return rows == longest and job.num_parts_left > 0

    def _more_loss_s(self, rows: int) -> float:
        """Return the seconds that rows add to the losses, which are one batch."""
        return self._latency.loss_s(self._loss_rows + rows) - self._time.loss_s

    def _add_loss(self, job: JobProgress, rows: int) -> None:
        self._losses.append(PlannedLoss(job.id, rows))
        self._loss_rows += rows
        self._time.loss_s = self._latency.loss_s(self._loss_rows)

    def _window(self, job: JobProgress, left_s: float, *, may_wait: bool) -> bool:
        """Add as many rows as fit, or fewer if they cost less each. Returns whether any are
        added.
        """
        longest = min(job.num_rows_left, self._max_rows - self._load.rows)
        least = min(job.num_rows_left, MIN_WINDOW_ROWS, self._max_rows)
        if longest < least:
            return False
        before_s, seconds = self._time.forward_s, self._latency.with_window(self._load, job)

        def extra_s(rows: int) -> float:
            return seconds(rows) - before_s

        if extra_s(least) > left_s:
            return False
        rows = largest_that_fits(least, longest, extra_s, left_s)
        # The step that is clearly cheapest per row, not the largest.
        while (
            rows // 2 >= least
            and (before_s + extra_s(rows // 2)) * CLEARLY < (before_s + extra_s(rows)) / 2
        ):
            rows //= 2
        good = min(longest, GOOD_ROWS)
        if may_wait and rows < good and extra_s(rows) / rows > MAX_ROW_COST * extra_s(good) / good:
            return False
        self._add_window(job, rows)
        return True

    def _add_window(self, job: JobProgress, rows: int) -> None:
        self._latency.add_window(self._load, job, rows)
        self._rows.append(PlannedRows(job.id, "window", job.num_rows - job.num_rows_left, rows))
        before_s, self._time.forward_s = self._time.forward_s, self._latency.forward_s(self._load)
        # Passes with windows have corrections of their own, so the time may even fall.
        self._time.window_s += max(0.0, self._time.forward_s - before_s)
