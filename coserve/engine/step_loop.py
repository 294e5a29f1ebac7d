"""The step loop: plan, run, apply.

A policy decides which requests are admitted and preempted, which packs are begun and dropped, and
which rows run. The loop checks that pages allow it, has the device run it, and applies the result;
what that means for requests is in `request_lifecycle.py`, for jobs in `job_set.py`.
"""

from collections.abc import Mapping

import msgspec

from coserve.devices.base import Device
from coserve.devices.messages.jobs import PlaceOptimizer
from coserve.devices.messages.pages import MovePages
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.engine.calibration import Calibration
from coserve.engine.command_log import CommandLog
from coserve.engine.config import EngineConfig
from coserve.engine.host_swap import HostSwap
from coserve.engine.jobs.job_set import JobSet
from coserve.engine.page_manager import PageManager
from coserve.engine.request_lifecycle import RequestLifecycle
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import ServedAdapters
from coserve.engine.step_batch import build_batch, prepare_plan, update_latency_model
from coserve.engine.tenant_charges import TenantCharges
from coserve.errors import DeviceMemoryError
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.history import StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, RequestProgress, SloUse, TenantView, View
from coserve.scheduling.policies import Policy
from coserve.scheduling.slo import DefaultSlo
from coserve.scheduling.slo.taken_time import taken_of
from coserve.scheduling.tenant_times import TenantTimes


class _Begun(msgspec.Struct, frozen=True):
    """A step that the device is running."""

    view: View
    """What the policy saw."""
    plan: Plan
    """The plan, as far as it could be carried out."""
    batch: StepBatch
    """The device's batch."""
    started_s: float
    """Time at which planning began."""


class StepLoop:
    """The loop of steps for all requests and jobs of an engine.

    `num_steps` counts the steps that the device has done. `last_result` is that of the last plan,
    and None if it ran nothing or the device failed. `last_slo_use` is what requests needed of their
    SLOs when the last step was planned. `times` holds what each tenant was served.
    """

    def __init__(
        self,
        device: Device,
        latency: LatencyModel,
        config: EngineConfig,
        *,
        policy: Policy,
        default_slo: DefaultSlo,
        log: CommandLog,
        pages: PageManager,
        swap: HostSwap,
        requests: RequestQueue,
        request_lifecycle: RequestLifecycle,
        adapters: ServedAdapters,
        jobs: JobSet,
        counters: TokenCounters,
        calibration: Calibration,
    ) -> None:
        """Begin without a step."""
        self._device, self._latency, self._config = device, latency, config
        self._log, self._pages, self._swap = log, pages, swap
        self._requests, self._request_lifecycle = requests, request_lifecycle
        self._adapters, self._jobs, self._counters = adapters, jobs, counters
        self.times = TenantTimes(config.tenant_weights)
        self._charges = TenantCharges(self.times, requests, jobs)
        self._calibration = calibration
        self._default_slo = default_slo
        self.policy = policy
        self.num_steps = 0
        self.last_plan = Plan()
        self.last_result: StepResult | None = None
        self.last_slo_use = SloUse()
        self._step: _Begun | None = None  # under way
        pages.on_move = self._move_pages
        log.on_lost = self._close_running
        self._max_step_rows = config.max_step_rows
        self._num_model_changes = 0  # number that waiting requests have been updated to

    @property
    def policy(self) -> Policy:
        """Scheduling policy; one that is set begins without a history."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self._history = policy, policy.make_history()

    # -- a step -----------------------------------------------------------------------

    def begin(self) -> bool:
        """Plan a step, and have the device begin it. Returns whether there is a step; `finish` must
        follow.
        """
        if self._step is not None:  # the caller was interrupted before it could finish
            self.finish()
        # A replay may close running requests, so it comes before the plan is made.
        self._log.replay()
        self._jobs.catch_up()
        # After `catch_up`, which may apply other nodes' contributions and so change the weights.
        self._note_model_changes()
        self._bring_back_adapters()
        started_s = self._device.clock.now()
        self._charges.note_begin(started_s)
        num_moved = self._pages.num_moved
        view, plan = self._plan(started_s)
        if self._pages.num_moved != num_moved:  # predictions of steps do not include moves
            started_s = self._device.clock.now()
        self.last_plan, self.last_result = plan, None
        self._jobs.count_turn()
        if plan.runs_nothing:
            self._log.flush()
            return False
        # The log's head is read last: preparing the plan has appended commands of this very step.
        batch = build_batch(self.num_steps, plan, self._requests, self._jobs, self._log.head())
        self._step = _Begun(view, plan, batch, started_s)
        try:
            self._log.submit(batch)
        except BaseException as error:
            # Ctrl-C included: the device may have begun the step or not.
            self._step = None
            self._forget(batch, error)
            raise
        return True

    def finish(self) -> None:
        """Wait for the device, and apply the result of the step, if there is one."""
        if self._step is not None:
            # Cleared first, so that an interruption below never books the same step twice.
            step, self._step = self._step, None
            try:
                result = self._log.collect()
            except BaseException as error:
                self._forget(step.batch, error)
                raise
            # An error here leaves the result applied in part, so what the step touched is given up.
            try:
                self._book(step, result)
            except BaseException as error:
                self._forget(step.batch, error)
                raise
        self.drop_unread_versions()
        if not (self._requests or self._jobs.num_running):
            self._charges.note_rest()
            self._log.flush()  # there may be no further step

    def _book(self, step: _Begun, result: StepResult) -> None:
        now_s = self._device.clock.now()
        self.last_result = result
        if result.failure is None:
            self._apply(step, result, now_s)
            self._remember(step, result)
        else:
            self._recover(step.batch, result, now_s)

    def _forget(self, batch: StepBatch, error: BaseException) -> None:
        """Give up a step of which it is not known how much has run, or how much of it was applied;
        its commands are not lost (`CommandLog`).
        """
        # The device may have written pages and counted sampled tokens that the books do not have.
        self._close_running()
        self._jobs.lifecycle.abandon(batch, error)

    def _close_running(self) -> None:
        """Preempt all running requests, since it is not known what the device has of them: they are
        to be opened again.
        """
        # Each goes to the head of the queue: the first one is to be the first again.
        for request in reversed(list(self._requests.running.values())):
            self._log.send(self._requests.preempt(request))

    def _note_model_changes(self) -> None:
        """Pass a change of the weights on to waiting requests."""
        number = self._adapters.versions.num_model_changes
        if number != self._num_model_changes:
            self._num_model_changes = number
            self._requests.note_model_changes(number)

    # -- adapters ---------------------------------------------------------------------

    def drop_unread_versions(self) -> None:
        """Have the device drop adapter versions that no request reads and no name refers to any
        more, and swap out those that nobody reads and the host has room for; not within a step.
        """
        if self._step is not None:
            return
        if unread := self._adapters.take_unread():
            for command in unread:
                self._log.send(command)
            self._log.flush()  # at once: they are large, and there may be no further step
        self._adapters.make_room()

    def _bring_back_adapters(self) -> None:
        """Swap in the adapters that requests are to read."""
        for key in self._adapters.wanted():
            try:
                self._adapters.bring_back(key)
            except DeviceMemoryError as error:
                self._request_lifecycle.fail_readers(
                    key, f"the device has no memory for its adapter: {error}"
                )

    # -- plan -------------------------------------------------------------------------

    def _plan(self, now_s: float) -> tuple[View, Plan]:
        """Return the policy's view, and its plan as far as it can be carried out.

        A pack may fail to begin although enough pages are there, when they are not side by side.
        Then the policy plans again without that job: it had given it rows, which others can use.
        """
        # Jobs whose packs could not begin. Each round adds one at least, so the loop ends.
        failed: frozenset[str] = frozenset()
        while True:
            view = self._view(now_s, without=failed)
            view, planned = self._ask_policy(view)
            plan = prepare_plan(
                planned,
                self._requests,
                self._jobs,
                policy=self._config.policy,
                send=self._log.send,
                max_requests=self._config.max_requests,
                num_units=self._device.info.num_units,
            )
            if not planned.begin:
                return view, plan
            begun = [self._jobs[job] for job in planned.begin if job in self._jobs]
            # The policy wanted these to begin, and they still have no pack.
            new = frozenset([job.id for job in begun if not job.has_pack]) - failed
            if not new:
                return view, plan
            failed |= new

    def _ask_policy(self, view: View) -> tuple[View, Plan]:
        """Return the policy's plan with the view that it is for: one without jobs while a request
        excludes them.
        """
        if not (view.jobs and self._requests.excludes_jobs()):
            planned = self.policy.plan(view, self._latency)
            # The plan may itself admit such a request, beside which no job may have a step.
            if not (view.jobs and self._requests.excludes_jobs(planned.admit)):
                return view, planned
        # No job has a step, but packs in memory make room for requests as they otherwise do.
        packs = tuple([job for job in view.jobs if job.phase != "pack"])
        drop = (
            self.policy.plan(msgspec.structs.replace(view, jobs=packs), self._latency).drop
            if packs
            else ()
        )
        # The second plan may count on the pages that these drops free.
        num_pages = sum([job.num_pages for job in packs if job.id in drop])
        view = msgspec.structs.replace(
            view, jobs=(), num_free_pages=view.num_free_pages + num_pages
        )
        planned = self.policy.plan(view, self._latency)
        return view, msgspec.structs.replace(planned, drop=drop)

    def _move_pages(self, targets: Mapping[int, int]) -> bool:
        """Copy pages of running requests to free ones (`PageManager.on_move`). Returns False, and
        nothing has moved, if there is no memory for it.
        """
        try:
            self._log.execute(MovePages(tuple(targets), tuple(targets.values())))
        except DeviceMemoryError:
            return False
        except BaseException:
            # The device has moved them or will (the log), while the books have the old pages.
            self._close_running()
            raise
        for request in self._requests.running.values():
            if request.sequence is not None:
                request.sequence.move(targets)
        return True

    def _view(self, now_s: float, *, without: frozenset[str]) -> View:
        requests, waiting = self._requests.running_progress(), self._requests.waiting_progress()
        batch: tuple[RequestProgress, ...] = ()
        batch_waiting: tuple[RequestProgress, ...] = ()
        if self._requests.has_batch:
            batch = self._requests.running_progress(is_batch=True)
            batch_waiting = self._requests.waiting_progress(is_batch=True)
        # Policies without a rule for batch work get it among all other requests.
        if not self._policy.serves_batch:
            requests += batch
            batch = ()
            waiting += batch_waiting
            batch_waiting = ()
        self.last_slo_use = self._request_lifecycle.headroom.use(now_s)
        slo = self._default_slo.value
        return View(
            now_s,
            requests,
            waiting,
            batch,
            batch_waiting,
            self._jobs.progress(now_s, without=without),
            tenants=self._tenants(now_s) if self._policy.is_fair else (),
            num_free_pages=self._pages.cache.num_available,
            num_pages=self._pages.pool.num_pages,
            block_tokens=self._config.block_tokens,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            max_rows=self._max_step_rows,
            max_requests=self._config.max_requests,
            slo_use=self.last_slo_use,
            num_units=self._device.info.num_units,
            history=self._history,
            give_back_s=self._swap.give_back_s,
        )

    def _tenants(self, now_s: float) -> tuple[TenantView, ...]:
        """Return the tenants that have work, or had some lately."""
        self.times.note_present(self._requests.num_by_tenant.keys() | self._jobs.tenants, now_s)
        return self.times.views(self._counters.served)

    # -- apply ------------------------------------------------------------------------

    def _apply(self, step: _Begun, result: StepResult, now_s: float) -> None:
        plan, batch, started_s = step.plan, step.batch, step.started_s
        self.num_steps += 1
        # A placement without pages moves an optimizer's moments out of the pool.
        have_left = any(
            isinstance(each, PlaceOptimizer) and not each.num_pages for each in batch.commands
        )
        self._swap.note_step(result.copy_s, result.weights_room_s, have_left=have_left)
        # A step that ran out of memory halves the limit; each good step raises it by 1/64.
        self._max_step_rows = min(
            self._config.max_step_rows, self._max_step_rows + 1 + self._max_step_rows // 64
        )
        parameters = [self._jobs[job_id].costs.counts.num_parameters for job_id in plan.updates]
        # Tasklets of different models have corrections of their own.
        models = (
            {part.job: self._jobs[part.job].costs.counts.model for part in plan.tasklets}
            if plan.tasklets
            else {}
        )
        update_latency_model(
            self._latency, plan, result, parameters, models, step_s=now_s - started_s
        )
        taken = taken_of(plan, step_s=result.seconds - result.copy_s, forward_s=result.forward_s)
        self._request_lifecycle.taken_time.add(taken, started_s=started_s, ended_s=now_s)
        self._request_lifecycle.headroom.add_step(plan, taken, started_s=started_s, ended_s=now_s)
        # Before the results are applied: requests that end in this step must be charged, too.
        self._charges.note_step(batch, result, started_s=started_s, now_s=now_s)
        if batch.requests:
            self._request_lifecycle.apply(batch, result, started_s=started_s, now_s=now_s)
        self._jobs.apply(batch, result, started_s=started_s, now_s=now_s)
        # Optimizer steps in `apply` may have changed the weights that waiting requests will read.
        self._note_model_changes()
        self._calibration.follow_steps(self.num_steps)

    def _remember(self, step: _Begun, result: StepResult) -> None:
        """Add a step to the policy's history."""
        if self._history is None:
            return
        self._history.add(
            StepView(
                view=step.view,
                latency=self._latency,
                plan=step.plan,
                forward_s=result.forward_s,
                loss_s=result.loss_s,
                backward_s=result.backward_s,
                update_s=result.update_s,
                beside_s=result.beside_s,
                num_tasklets=result.num_tasklets,
                num_beside=result.num_beside,
                num_running=len(self._requests.running),
                num_waiting=len(self._requests.waiting),
                num_arrived=self._requests.num_arrived,
                num_ended=self._requests.num_ended,
            )
        )

    def _recover(self, batch: StepBatch, result: StepResult, now_s: float) -> None:
        """Recover from a step that ran out of memory: jobs make room first, then steps get smaller,
        then a request fails.
        """
        assert result.failure is not None
        if not self._jobs.recover(batch, result, now_s):
            self._recover_requests(batch, result.failure.message)
        # Layers that ran before the failure have advanced their states: no row may run twice.
        if self._pages.cache.num_state_pages:
            self._close_running()

    def _recover_requests(self, batch: StepBatch, reason: str) -> None:
        num_rows = sum(len(rows.tokens) for rows in batch.requests)
        # Retry with half the rows; a single row cannot be halved, so its request fails.
        if num_rows > 1:
            self._max_step_rows = num_rows // 2
            return
        self._request_lifecycle.fail(batch, f"the device ran out of memory: {reason}")
