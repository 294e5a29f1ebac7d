"""One step on torch, section by section, in the order of `StepBatch`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite

import torch

from coserve.devices.messages.steps import (
    LossRows,
    PackSums,
    StepBatch,
    StepFailure,
    StepResult,
    Tasklets,
)
from coserve.devices.ranks.verdicts import Failure, agree_on_end, check_alike, last_word, one_line
from coserve.devices.sides.base import Sides
from coserve.devices.torch.other_models import OtherModels
from coserve.devices.torch.process_memory import memory_errors
from coserve.devices.torch.readout import Pending, Readout
from coserve.devices.torch.requests import TorchRequests
from coserve.devices.torch.requests_result import RequestsResult
from coserve.devices.torch.tasklet_turns import tasklet_turns
from coserve.devices.torch.timing import SectionTimer, section_timer
from coserve.devices.torch.trainer import TorchTrainer
from coserve.errors import DeviceMemoryError, RankError, WeightsError
from coserve.memory.tensors.host_pages import HostPages
from coserve.models.backbone import Backbone
from coserve.models.batch import RowSpan, forward
from coserve.scheduling.plan import Partition
from coserve.tuning.blockwise import BlockwisePass
from coserve.tuning.joined import joined_tasklet, run_losses
from coserve.tuning.layerwise import LayerwisePass
from coserve.tuning.tasklet import Tasklet
from coserve.tuning.training_pass import TrainingPass

# How long a step without a time limit waits for weights, at most: who arrives meanwhile waits with
# it.
_MAX_WAIT_S = 0.1


class TorchStep:
    """One step, between its launch and its result."""

    def __init__(
        self,
        backbone: Backbone,
        requests: TorchRequests,
        trainers: dict[str, TorchTrainer],
        sides: Sides | None,
        host: HostPages,
        others: OtherModels,
        batch: StepBatch,
        *,
        copy_s: float,
    ) -> None:
        """Prepare the step.

        Args:
            backbone: The model.
            requests: The device's requests.
            trainers: Its jobs.
            sides: The two sides of the device, if it can be divided.
            host: Slots of host memory.
            others: Models that jobs train beside the one on the device.
            batch: What is to run.
            copy_s: Seconds of copies since the last step.
        """
        self._backbone = backbone
        self._requests = requests
        self._trainers = trainers
        self._batch = batch
        self._sides, self._host, self._others, self._copy_s = sides, host, others, copy_s
        self._weights_before = (others.waited_s, others.num_bytes_copied)
        self._room_s = others.take_resized_s()
        self._rows = [rows for rows in batch.requests if rows.tokens]
        self._spans: list[RowSpan] = []
        self._timer: SectionTimer = section_timer(backbone.device)
        self._readout = Readout()
        self._turns = tasklet_turns(batch.tasklets, lambda job: self._pass(job).num_parts_done)
        # The turn of tasklets that is under way, and its joined tasklet, if that is not done.
        self._turn: list[Tasklets] = []
        self._tasklet: Tasklet | None = None
        self._num_tasklets = dict.fromkeys([piece.job for piece in batch.tasklets], 0)
        self._num_beside: dict[str, int] = {}
        self._num_declined = 0
        self._broken: dict[str, str] = {}
        # Times of the sides of a divided device.
        self._waited_s = self._forward_s = self._beside_s = _no_time
        self._norms: dict[str, Pending] = {}
        self._updating: str | None = None
        self._served: RequestsResult | None = None
        self._totals: dict[str, Pending] = {}
        self._failure: str | None = None
        self._error: Exception | None = None

    def launch(self) -> None:
        """Launch everything, in the order of `StepBatch`.

        The requests' tokens and pages go to the device before anything runs there.
        """
        try:
            with torch.inference_mode(), memory_errors(), self._fixed_order():
                for section in self._sections():
                    section()
                    self._timer.mark()
                self._totals = {
                    job: self._readout.add(training.totals)
                    for job, training in self._passes()
                    if training.done
                }
        except DeviceMemoryError as error:
            self._failure = str(error)  # the error itself holds what was computed
        except Exception as error:  # told with the result, as from a device that is elsewhere
            self._error = error
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        """Fail the step on other ranks if it has failed here, so that none waits for this one."""
        reason = self._error or self._failure
        if reason is not None and not isinstance(reason, RankError):
            self._backbone.group.fail(one_line(reason))

    def result(self) -> StepResult:
        """Wait for the step, and return its result; packs that are done leave their gradients with
        their jobs.

        Of several ranks all call this, and all have a result, or all raise (`ranks.verdicts`).

        Raises:
            RankGoneError: The group of ranks is over.
            Exception: Whatever went wrong, other than running out of memory, here or (RankError) on
                another rank.
        """
        group = self._backbone.group
        with torch.inference_mode():
            if group.size > 1:
                self._agree_on_end()
            if self._error is not None:
                raise self._error
            # Work of a GPU is launched by now, but its errors appear only where something waits for
            # it.
            self._readout.read()
        with torch.inference_mode(), last_word(group):
            result = self._success() if self._failure is None else self._failed(self._failure)
        check_alike(
            group,
            (result.num_tasklets, result.packs, result.norms, result.failure),
            "results of a step",
        )
        return result

    def _agree_on_end(self) -> None:
        """Have the step end as on all ranks."""
        group = self._backbone.group
        if self._error is None and self._failure is None:
            try:  # what the device still does can fail, too
                self._readout.read()
            except Exception as error:
                self._error = error
                self._tell_ranks()
        own = self._error
        if own is None and self._failure is not None:
            own = DeviceMemoryError(self._failure)
        failure = agree_on_end(
            group,
            None if own is None else Failure.of(own, group.rank, broken_update=self._updating),
        )
        if failure is None:
            return
        # Only a lack of memory is a result of the step (`StepFailure`); all else is raised.
        if failure.kind != "memory":
            self._error = failure.error(group.rank, self._error)
            return
        # A rank that succeeded takes over the failure, so that all results are alike.
        self._error, self._failure, self._updating = None, failure.text, failure.broken_update
        if failure.broken_update is not None:  # this rank may have finished it
            self._norms.pop(failure.broken_update, None)

    def _success(self) -> StepResult:
        prepare_s, loss_s, backward_s, update_s, wait_s, forward_s = self._timer.sections_s()
        if self._batch.partition is not None:  # the first section was both sides
            prepare_s, wait_s = 0.0, self._waited_s()
            forward_s = self._forward_s() - wait_s
        return StepResult(
            step=self._batch.step,
            tokens=self._served.tokens() if self._served else {},
            ended=self._served.ended() if self._served else (),
            refused=self._served.refused() if self._served else {},
            embeddings=self._served.embeddings() if self._served else {},
            prompts=self._served.prompts() if self._served else {},
            num_tasklets=self._num_tasklets,
            num_beside=self._num_beside,
            packs={job: self._finish_pack(job, totals) for job, totals in self._totals.items()},
            norms=self._read_norms(),
            forward_s=prepare_s + forward_s,
            loss_s=loss_s,
            backward_s=backward_s,
            update_s=update_s,
            beside_s=self._beside_s(),
            copy_s=self._copy_s + wait_s if self._copy_s else 0.0,
            broken=self._broken,
            num_declined=self._num_declined,
            weights_wait_s=self._others.waited_s - self._weights_before[0],
            weight_bytes=self._others.num_bytes_copied - self._weights_before[1],
            weights_room_s=self._room_s,
        )

    def _failed(self, message: str) -> StepResult:
        """Return the result of a step that has failed; optimizer steps that were made stand."""
        failure = StepFailure(message=message, broken_update=self._updating)
        return StepResult(step=self._batch.step, norms=self._read_norms(), failure=failure)

    @contextmanager
    def _fixed_order(self) -> Iterator[None]:
        """Have PyTorch add in a fixed order, where results must be the same bit for bit.

        On a GPU, sums that threads add come out in another order each time otherwise.
        """
        if self._backbone.block_rows is None or self._backbone.device.type != "cuda":
            yield
            return
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    # -- sections -------------------------------------------------------------------

    def _sections(self) -> tuple[Callable[[], None], ...]:
        """Return the six sections, so that their times can be told apart; empty ones where nothing
        runs.
        """
        partition = self._batch.partition
        if partition is None:
            # Losses and tasklets read no pages that are copied from the host, so these copies go on
            # beside them, and only the forward pass waits.
            return (
                self._prepare,
                self._losses,
                self._backward,
                self._updates,
                self._host.wait,
                self._forward,
            )
        # Unless the partition stops with the forward pass, tasklets go on alone on the whole
        # device.
        rest = _nothing if partition.stops else self._backward
        return partial(self._divided, partition), _nothing, rest, self._updates, _nothing, _nothing

    def _divided(self, partition: Partition) -> None:
        """Run the forward pass here, and losses and tasklets in another thread, each side on its
        units.

        Work that is under way there when the forward pass ends is finished on all units. The first
        tasklet runs in any case.
        """
        assert self._sides is not None, "it cannot be divided"
        # When this context ends, both sides are done (on a GPU: launched), but for a turn that was
        # stopped in the middle.
        with self._sides.running(self._work_beside, partition):
            self._host.wait()
            self._waited_s = self._timer.lap()
            self._prepare()
            self._forward()
            self._forward_s = self._timer.lap()
        # A tasklet that was stopped in the middle is finished on all units; its rows count in this
        # step.
        if self._turn:
            self._run_turn()
            self._beside_s = self._timer.lap()
        elif not any(self._num_tasklets.values()) and self._begin_turn():
            self._run_turn()

    def _work_beside(self, forward_has_ended: Callable[[], bool]) -> None:
        # Losses first: tasklets of the same packs need their gradients.
        self._losses()
        self._backward(forward_has_ended)
        under_way = {piece.job for piece in self._turn}
        # A turn that was stopped counts as one beside the forward pass, where most of it ran.
        started = {job: number + (job in under_way) for job, number in self._num_tasklets.items()}
        self._num_beside = {job: number for job, number in started.items() if number}
        self._beside_s = self._timer.lap()

    def _prepare(self) -> None:
        self._spans = self._requests.spans(self._rows)

    def _losses(self) -> None:
        joined, apart = self._pieces(self._batch.losses)
        for training, num_rows in apart:
            training.run_loss(num_rows)
        run_losses(joined)

    def _backward(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Run as many tasklets as there is time for, until it is stopped, perhaps in the middle of
        one.
        """
        while not stopped() and self._begin_turn():
            self._run_turn(stopped)

    def _begin_turn(self) -> bool:
        """Return whether tasklets are under way: those before, or the next ones, if there is time
        for them.
        """
        if self._turn:
            return True
        # A turn is one tasklet of each of some jobs, which run joined where they can.
        while self._has_time() and (turn := next(self._turns, None)):
            if not (turn := [piece for piece in turn if not self._is_declined(piece.job)]):
                continue
            joined, apart = self._pieces(turn)
            for training, num_rows in apart:
                # These cannot stop in the middle, so they run before the joined one, which can.
                training.run_tasklet(num_rows)
            self._turn, self._tasklet = turn, joined_tasklet(joined) if joined else None
            return True
        return False

    def _is_declined(self, job: str) -> bool:
        """Return whether a tasklet does not begin, since the weights that it needs are not there.

        They are waited for where no request is in the step, as long as tasklets may begin; without
        a limit, for a moment.
        """
        training = self._pass(job)
        if not isinstance(training, LayerwisePass):
            return False
        limit_s, most_s = self._batch.backward_limit_s, 0.0
        if not self._rows:
            # Nobody waits for tokens: the step may wait for weights until its time is over.
            most_s = _MAX_WAIT_S if limit_s is None else limit_s - self._timer.elapsed_s()
        try:
            declined = job in self._broken or not training.is_there(most_s)
        except WeightsError as error:
            self._broken[job] = str(error)
            declined = True
        self._num_declined += declined
        return declined

    def _run_turn(self, stopped: Callable[[], bool] = lambda: False) -> None:
        if self._tasklet is not None and not self._tasklet.run_until(stopped):
            return
        for piece in self._turn:
            self._num_tasklets[piece.job] += 1
        self._turn, self._tasklet = [], None

    def _has_time(self) -> bool:
        """Return whether another tasklet may begin; the step's first one always may.

        Beside a forward pass the timer is read in any case: the host must not run far ahead of the
        device.
        """
        limit_s, partition = self._batch.backward_limit_s, self._batch.partition
        if (limit_s is None and partition is None) or not any(self._num_tasklets.values()):
            return True
        # By the clock of rank 0: all ranks run as many tasklets.
        has_time = self._timer.elapsed_s() < (inf if limit_s is None else limit_s)
        return bool(self._backbone.group.agree(has_time))

    def _updates(self) -> None:
        for update in self._batch.updates:
            # No rank begins while another one may still fail in what came before: so at most one
            # update is broken, and the same on all ranks.
            self._backbone.group.barrier()
            # Until the update has ended: a failure in between leaves weights half changed.
            self._updating = update.job
            norm = self._trainers[update.job].update(update.num_trained, update.num_steps)
            self._norms[update.job] = self._readout.add(norm)
            self._updating = None

    def _forward(self) -> None:
        """Run all rows through the blocks; then choose tokens, score prompts, and keep what windows
        leave.
        """
        requests, passes, spans = self._rows, [], list(self._spans)
        for window in self._batch.windows:
            training = self._pass(window.job)
            if isinstance(training, BlockwisePass):
                training.run_window(window.num_rows)
            else:
                passes.append(training)
                spans.append(training.next_window(window.num_rows))
        if not spans:
            return
        # Requests' rows come first in `spans`, then those of windows (`TorchRequests.finish`).
        hidden = forward(self._backbone, spans)
        self._served = self._requests.finish(hidden, requests, self._readout)
        # [rows, hidden_size]: windows' rows begin after all requests' rows.
        start = sum([span.num_rows for span in self._spans])
        for training, span in zip(passes, spans[len(self._spans) :], strict=True):
            training.finish_window(hidden[start : start + span.num_rows])
            start += span.num_rows

    # -- packs ----------------------------------------------------------------------

    def _pieces(
        self, pieces: Sequence[LossRows] | Sequence[Tasklets]
    ) -> tuple[list[tuple[TrainingPass, int]], list[tuple[TrainingPass, int]]]:
        """Return passes and their rows: those that may run as one, and those that each run by
        themselves.
        """
        joined: list[tuple[TrainingPass, int]] = []
        apart: list[tuple[TrainingPass, int]] = []
        for piece in pieces:
            training = self._pass(piece.job)
            (joined if training.joins_others else apart).append((training, piece.num_rows))
        return joined, apart

    def _pass(self, job: str) -> TrainingPass:
        training = self._trainers[job].training_pass
        assert training is not None, f"job {job} has no pack"
        return training

    def _passes(self) -> list[tuple[str, TrainingPass]]:
        """Return the passes that the step has moved on."""
        batch = self._batch
        # Without repeats and in this order, which is the same on all ranks.
        jobs = [
            *(piece.job for piece in batch.losses),
            *(piece.job for piece in batch.tasklets),
            *(window.job for window in batch.windows),
        ]
        return [(job, self._pass(job)) for job in dict.fromkeys(jobs)]

    def _finish_pack(self, job: str, totals: Pending) -> PackSums:
        loss, num_correct = totals.floats()
        training = self._pass(job)
        self._trainers[job].finish_pack()
        return PackSums(
            loss=loss,
            num_correct=int(num_correct),
            num_trained=training.num_units,
            metrics=training.metrics,
        )

    def _read_norms(self) -> dict[str, float | None]:
        # None: the gradient was not finite (`StepResult.norms`).
        norms = {job: norm.floats()[0] for job, norm in self._norms.items()}
        return {job: norm if isfinite(norm) else None for job, norm in norms.items()}


def _no_time() -> float:
    return 0.0


def _nothing() -> None:
    """Do nothing: a section of another kind of step."""
