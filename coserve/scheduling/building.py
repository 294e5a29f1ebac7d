"""Building a plan piece by piece: what policies share. A policy says how much time there is; here is what fits."""

from collections.abc import Callable, Sequence
from math import inf

from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import JobView, Plan, PlannedLoss, PlannedRows, PlannedTasklets, RequestView, View

# The smallest piece of a prompt that has to go on, and of one that rides along; unless it is all that is left.
LEAST_PREFILL_ROWS, LEAST_RIDING_ROWS = 64, 16
# The smallest window of a job, or piece of its loss, unless it is all that is left, or a forward pass may not have so
# many rows.
LEAST_WINDOW_ROWS = 16
# Either may cost so many times per row what one of so many rows would; a smaller one waits until more time has been
# saved up, where that can be: slack is spent in lumps.
MOST_ROW_COST, GOOD_ROWS = 1.1, 256


class PlanBuilder:
    """A plan that grows, and what it will take so far."""

    def __init__(self, view: View, latency: LatencyModel) -> None:
        self._latency, self._max_rows = latency, view.max_rows
        self._load = ForwardLoad()
        self._rows: list[PlannedRows] = []
        self._losses: list[PlannedLoss] = []
        self._tasklets: list[PlannedTasklets] = []
        self._updates: list[str] = []
        self._forward_s = self._loss_s = self._backward_s = self._update_s = 0.0

    @property
    def seconds(self) -> float:
        """What the plan takes, without a margin."""
        return self._forward_s + self._loss_s + self._backward_s + self._update_s

    def build(self, memory: MemoryPlan | None = None) -> Plan:
        """The plan; memory: the pages that change hands before it."""
        return Plan(
            preempt=tuple(memory.preempt) if memory else (),
            drop=tuple(memory.drop) if memory else (),
            admit=tuple(memory.admit) if memory else (),
            begin=tuple(memory.begin) if memory else (),
            rows=tuple(self._rows),
            losses=tuple(self._losses),
            tasklets=tuple(self._tasklets),
            updates=tuple(self._updates),
            forward_s=self._forward_s,
            loss_s=self._loss_s,
            backward_s=self._backward_s,
            update_s=self._update_s,
        )

    def decode(self, requests: Sequence[RequestView]) -> None:
        """One row for each of them; if that is too many, for those that wait longest."""
        if len(requests) > self._max_rows:
            requests = sorted(requests, key=lambda request: request.last_token_s)[: self._max_rows]
        self._load.add_decodes(requests)
        self._rows += [PlannedRows(request.id, "decode", request.num_past, 1) for request in requests]
        self._forward_s = self._latency.forward_s(self._load)

    def prefill(self, requests: Sequence[RequestView], budget_s: float, *, urgent: bool = True) -> bool:
        """Their tokens, in this order, as far as the time goes. Returns whether all of them are in.

        urgent: the first one has to go on: it gets its smallest piece in any case.
        """
        for index, request in enumerate(requests):
            longest = min(request.num_rows, self._max_rows - self._load.rows)
            must = urgent and index == 0
            least = min(longest, LEAST_PREFILL_ROWS if must else LEAST_RIDING_ROWS)
            if longest < 1:
                return False
            if not must and self._with_prompt_s(request, least) > budget_s:
                return False
            rows = _most(least, longest, lambda rows, r=request: self._with_prompt_s(r, rows) <= budget_s)  # type: ignore[misc]
            self._load.add_request(request, rows)
            self._rows.append(PlannedRows(request.id, "prefill", request.num_past, rows))
            self._forward_s = self._latency.forward_s(self._load)
            if rows < request.num_rows:
                return False
        return True

    def tune(self, jobs: Sequence[JobView], budget_s: float, *, max_defer_s: float = 0.0) -> None:
        """Of each job in turn, the largest piece of its current phase that fits into what is left of the time.

        max_defer_s: how long what costs too much per row may wait, because a later step will have more time.

        A device that has nothing else to do makes the smallest step there is, whatever the time: no later one would
        have more.
        """
        for job in jobs:
            left_s = budget_s - self.seconds
            if left_s <= 0:
                break
            if job.phase == "update":
                self._update(job, left_s)
            elif job.phase == "backward":
                self._backward(job, left_s)
            elif job.phase == "loss":
                self._loss(job, left_s, patient=job.waited_s < max_defer_s)
            else:
                self._window(job, left_s, patient=job.waited_s < max_defer_s)
        if jobs and not (self._rows or self._losses or self._tasklets or self._updates):
            self._least(jobs[0])

    def _least(self, job: JobView) -> None:
        """The smallest piece of a job."""
        rows = min(job.num_rows_left, LEAST_WINDOW_ROWS)
        if job.phase == "update":
            self._update(job, inf)
        elif job.phase == "backward":
            self._tasklets.append(PlannedTasklets(job.id, rows, 1))
            self._backward_s += self._latency.tasklet_s(job, rows)
        elif job.phase == "loss":
            self._losses.append(PlannedLoss(job.id, rows))
            self._loss_s += self._latency.loss_s(rows)
        else:
            self._add_window(job, min(rows, self._max_rows))

    def _update(self, job: JobView, left_s: float) -> None:
        seconds = self._latency.update_s(job)
        if seconds <= left_s:
            self._updates.append(job.id)
            self._update_s += seconds

    def _backward(self, job: JobView, left_s: float) -> None:
        """Tasklets of as many rows as possible: first what is left of the current part, then whole parts."""
        rows = job.num_rows_left
        seconds = self._latency.tasklet_s(job, rows)
        while seconds > left_s and rows > LEAST_WINDOW_ROWS:
            rows = max(LEAST_WINDOW_ROWS, rows // 2)
            seconds = self._latency.tasklet_s(job, rows)
        if seconds > left_s:
            return
        if rows < job.num_rows_left:
            num_tasklets = _times(seconds, left_s, job.num_rows_left // rows)
            self._backward_s += num_tasklets * seconds
        else:
            rows = job.num_rows
            whole_s = self._latency.tasklet_s(job, rows)
            num_whole = _times(whole_s, left_s - seconds, job.num_parts_left - 1)
            num_tasklets = 1 + num_whole
            self._backward_s += seconds + num_whole * whole_s
        self._tasklets.append(PlannedTasklets(job.id, rows, num_tasklets))

    def _loss(self, job: JobView, left_s: float, *, patient: bool) -> None:
        """As many rows as possible; behind the last ones, tasklets."""
        longest = job.num_rows_left
        least = min(longest, LEAST_WINDOW_ROWS)
        if self._latency.loss_s(least) > left_s:
            return
        rows = _most(least, longest, lambda rows: self._latency.loss_s(rows) <= left_s)
        seconds = self._latency.loss_s(rows)
        good = min(longest, GOOD_ROWS)
        if patient and rows < good and seconds / rows > MOST_ROW_COST * self._latency.loss_s(good) / good:
            return
        self._losses.append(PlannedLoss(job.id, rows))
        self._loss_s += seconds
        if rows == longest and job.num_parts_left:
            self._backward(job._replace(phase="backward", num_rows_left=job.num_rows), left_s - seconds)

    def _window(self, job: JobView, left_s: float, *, patient: bool) -> None:
        longest = min(job.num_rows_left, self._max_rows - self._load.rows)
        least = min(job.num_rows_left, LEAST_WINDOW_ROWS, self._max_rows)
        before_s = self._forward_s

        def extra_s(rows: int) -> float:
            return self._latency.with_window_s(self._load, job, rows) - before_s

        if longest < least or extra_s(least) > left_s:
            return
        rows = _most(least, longest, lambda rows: extra_s(rows) <= left_s)
        good = min(longest, GOOD_ROWS)
        if patient and rows < good and extra_s(rows) / rows > MOST_ROW_COST * extra_s(good) / good:
            return
        self._add_window(job, rows)

    def _add_window(self, job: JobView, rows: int) -> None:
        self._latency.add_window(self._load, job, rows)
        self._rows.append(PlannedRows(job.id, "window", job.num_rows - job.num_rows_left, rows))
        self._forward_s = self._latency.forward_s(self._load)

    def _with_prompt_s(self, request: RequestView, rows: int) -> float:
        return self._latency.with_request_s(self._load, request, rows)


def _times(seconds: float, within_s: float, most: int) -> int:
    """How many times something fits, `most` at most."""
    return most if most * seconds <= within_s else int(within_s / seconds)


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `least` to `most` that fits, to within a sixteenth; `least` if none does."""
    if fits(most):
        return most
    low, high = least, most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
