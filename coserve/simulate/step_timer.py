"""The times of a step on modelled hardware: seconds of each of its sections, and the number of
tasklets that run within its limit.

The packs of jobs advance by what runs.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf
from random import Random

import msgspec

from coserve.devices.messages.steps import RequestRows, StepBatch, Tasklets, Update
from coserve.devices.torch.tasklet_turns import tasklet_turns
from coserve.scheduling.latency import ForwardLoad, LatencyModel
from coserve.scheduling.plan import Partition, RequestProgress
from coserve.simulate.modelled_trainer import ModelledTrainer


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a step; the fields are those of `StepResult`."""

    forward_s: float
    """Forward pass."""
    loss_s: float
    """Losses."""
    backward_s: float
    """Tasklets, except those beside the forward pass."""
    update_s: float
    """Optimizer steps."""
    beside_s: float
    """Losses and tasklets beside the forward pass."""
    num_tasklets: dict[str, int]
    """Tasklets that ran, by job."""
    num_beside: dict[str, int]
    """Tasklets that ran beside the forward pass, by job."""


class _Work:
    """Tasklets of a step: the number that ran of each job, and the moments when those beside the
    forward pass, and all, ended.
    """

    def __init__(self, batch: StepBatch, start_s: float) -> None:
        self.num_tasklets = (
            dict.fromkeys([piece.job for piece in batch.tasklets], 0) if batch.tasklets else {}
        )
        self.num_beside: dict[str, int] = {}
        self.beside_s = self.end_s = start_s

    def add(self, turn: Sequence[Tasklets], end_s: float, *, is_beside: bool) -> None:
        """Count one tasklet of each job of a turn."""
        self.end_s = end_s
        for piece in turn:
            self.num_tasklets[piece.job] += 1
            if is_beside:
                self.num_beside[piece.job] = self.num_tasklets[piece.job]
        if is_beside:
            self.beside_s = end_s


class ModelledStepTimer:
    """The times of steps on one device."""

    def __init__(
        self,
        latency: LatencyModel,
        trainers: Mapping[str, ModelledTrainer],
        progress_of: Callable[[RequestRows], RequestProgress],
        *,
        noise: float,
        seed: int,
    ) -> None:
        """Begin with a device's jobs.

        Args:
            trainers: Jobs of the device, present and future.
            progress_of: Returns a request's rows as the latency model reads them.
            noise: Relative noise (`ModelledDevice`).
        """
        self._latency, self._trainers, self._progress_of = latency, trainers, progress_of
        self._noise, self._random = noise, Random(seed)

    def with_noise(self, seconds: float) -> float:
        """Return the time of a section with noise, given its mean."""
        return seconds * self._random.lognormvariate(0.0, self._noise) if self._noise else seconds

    def run(self, batch: StepBatch) -> StepTimes:
        """Run a step and return its times."""
        loss_s, forward_s, speed = self.with_noise(self._loss_s(batch)), 0.0, 1.0
        if batch.partition is not None:
            forward_s, speed = self._beside(batch, batch.partition)
        # Tasklets begin after the losses. Without a partition, speed is 1 and nothing runs beside.
        work = self._backward(batch, loss_s / speed, speed, forward_s)
        update_s = self.with_noise(
            sum([self._update_s(update) for update in batch.updates]) if batch.updates else 0
        )
        if batch.partition is None:
            has_rows = batch.requests or batch.windows
            forward_s = self.with_noise(
                self._latency.forward_s(self._load(batch)) if has_rows else 0.0
            )
        return StepTimes(
            forward_s=forward_s,
            loss_s=loss_s if batch.partition is None else 0.0,
            backward_s=work.end_s - work.beside_s,
            update_s=update_s,
            beside_s=work.beside_s if batch.partition is not None else 0.0,
            num_tasklets=work.num_tasklets,
            num_beside=work.num_beside,
        )

    def _beside(self, batch: StepBatch, partition: Partition) -> tuple[float, float]:
        """Return the time of the forward pass on its units, and the speed of losses and tasklets
        beside it.
        """
        load = self._load(batch)
        rows = max(
            [
                *[piece.num_rows for piece in batch.losses],
                *[piece.num_rows for piece in batch.tasklets],
            ]
        )
        forward_speed, speed = self._latency.sharing.speeds(
            partition, forward_rows=load.rows, tasklet_rows=rows
        )
        return self.with_noise(self._latency.forward_s(load) / forward_speed), speed

    def _loss_s(self, batch: StepBatch) -> float:
        if not batch.losses:
            return 0.0
        num_rows = 0
        for piece in batch.losses:
            cursor = self._trainers[piece.job].cursor
            start, end = cursor.next_loss(piece.num_rows)
            cursor.advance_loss(end - start)
            num_rows += end - start
        return self._latency.loss_s(num_rows)

    def _update_s(self, update: Update) -> float:
        counts = self._trainers[update.job].opened.counts
        return self._latency.update_s(counts)

    def _backward(
        self, batch: StepBatch, start_s: float, speed: float, forward_end_s: float
    ) -> _Work:
        """Run tasklets from a moment of the step on, until the time limit, at a pace that noise
        gives.

        Args:
            speed: Speed of tasklets beside the forward pass.
            forward_end_s: End of the forward pass beside which they run; 0 if they do not. A
                tasklet that is under way then ends on the whole device.
        """
        work = _Work(batch, start_s)
        if not batch.tasklets:
            return work
        pace, now_s = self.with_noise(1.0), start_s
        limit_s = inf if batch.backward_limit_s is None else batch.backward_limit_s
        if batch.partition is not None and batch.partition.stops:
            limit_s = min(limit_s, forward_end_s)
        if len(batch.tasklets) == 1 and batch.partition is None:
            self._run_alone(batch.tasklets[0], work, pace, limit_s)
            return work
        for turn in tasklet_turns(
            batch.tasklets, lambda job: self._trainers[job].cursor.num_parts_done
        ):
            # One turn runs whatever the limit is, so that jobs never stand still.
            if now_s >= limit_s and any(work.num_tasklets.values()):
                break
            seconds, is_beside = pace * self._tasklet_s(turn), now_s < forward_end_s
            # At the reduced speed until the forward pass ends, at full speed after that.
            done_s = min(seconds, speed * (forward_end_s - now_s)) if is_beside else 0.0
            now_s += done_s / speed + seconds - done_s
            work.add(turn, now_s, is_beside=is_beside)
        return work

    def _run_alone(self, piece: Tasklets, work: _Work, pace: float, limit_s: float) -> None:
        """Run the tasklets of one job alone, which most steps have, some dozen of them."""
        trainer = self._trainers[piece.job]
        cursor = trainer.cursor
        sizes = cursor.next_tasklets(piece.num_rows, piece.num_tasklets)
        seconds = {rows: pace * self._latency.tasklet_s(trainer.view, rows) for rows in set(sizes)}
        ends_s = list(accumulate(map(seconds.__getitem__, sizes), initial=work.end_s))
        # Each begins where the one before has ended; none after the limit but the first.
        num_run = min(len(sizes), max(1, bisect_left(ends_s, limit_s)))
        cursor.advance_tasklets(piece.num_rows, num_run)
        work.num_tasklets[piece.job], work.end_s = num_run, ends_s[num_run]

    def _tasklet_s(self, turn: Sequence[Tasklets]) -> float:
        """Return the time of tasklets of several jobs as one."""
        rows = []
        for piece in turn:
            trainer = self._trainers[piece.job]
            start, end = trainer.cursor.next_backward(piece.num_rows)
            trainer.cursor.advance_backward(end - start)
            rows.append((trainer.view, end - start))
        return self._latency.tasklets_s(rows)

    def _load(self, batch: StepBatch) -> ForwardLoad:
        """Return the load of the forward pass; windows count as run."""
        load = ForwardLoad()
        for rows in batch.requests:
            if rows.tokens:
                load.add_request(self._progress_of(rows), len(rows.tokens))
        for window in batch.windows:
            trainer = self._trainers[window.job]
            self._latency.add_window(load, trainer.view, window.num_rows)
            cursor = trainer.cursor
            cursor.next_forward(window.num_rows)
            cursor.advance_forward(window.num_rows)
        return load
