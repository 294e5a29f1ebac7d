"""The step loop: plan, run, apply. Requests, jobs and pages by number; a device has the tensors.

A policy decides: who is admitted, preempted, begun and dropped, and which rows run. The engine checks that pages allow
it, tells the device, and books what came of it. It is plain Python, and deterministic: the same inputs, clock readings
and results of the device give the same steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from coserve.devices.base import Device
from coserve.devices.messages import Command, OpenRequest, SaveAdapter, StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.checkpoint import Checkpoint, read_position
from coserve.engine.checks import check_examples
from coserve.engine.config import EngineConfig
from coserve.engine.job import Job, JobEvent
from coserve.engine.job_set import JobSet
from coserve.engine.job_start import PeftFields, trainer_start
from coserve.engine.page_broker import PageBroker
from coserve.engine.records import EngineStats, RequestRecord
from coserve.engine.request import Chunk
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import AdapterLoad, ServedAdapters
from coserve.engine.serving import Serving, TextStreamMaker
from coserve.engine.step_batch import build_batch, carry_out, observe
from coserve.engine.versions import AdapterVersion, AdapterVersions
from coserve.errors import AdapterError, JobError, RequestError
from coserve.memory.kv_cache import KvCache
from coserve.memory.pages import PagePool
from coserve.scheduling.attainment import taken_of
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.history import StepView
from coserve.scheduling.latency import LatencyModel, Profile
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies import Policy, make_policy
from coserve.scheduling.slo import Slo, default_tpot_s
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

Event = Chunk | JobEvent

_NUM_RECORDS = 10_000
# How often the default SLO follows what steps really take, and from what share of it on.
_STEPS_PER_LOOK, _SLO_CHANGE = 64, 0.05


class EngineCore:
    """Requests of token ids, and jobs of tokenized examples, on a device."""

    def __init__(
        self,
        device: Device,
        latency: LatencyModel,
        config: EngineConfig,
        *,
        end_tokens: Iterable[int] = (),
        text_stream: TextStreamMaker | None = None,
        keep_profile: Callable[[Profile], None] | None = None,
    ) -> None:
        """end_tokens: ids that end every request. text_stream: makes text of a request's tokens, given its prompt and
        params; without it there is none, and no stop strings. keep_profile: told what the device's profile should be
        if steps have long shown that it is something else.
        """
        info = device.info
        self.device, self.latency, self.config = device, latency, config
        self.policy = make_policy(config.policy, config.policy_settings)
        self.counters = TokenCounters(self.policy.token_weights)
        self.pages = PageBroker(num_pages=info.num_pages, page_bytes=info.page_bytes, block_tokens=info.block_tokens)
        self.requests = RequestQueue(self.pages.cache, self.counters)
        self.adapters = ServedAdapters(device, max_on_disk=config.max_adapters)
        self._outbox: list[Event] = []
        self._commands: deque[Command] = deque()  # for the device, with the next step
        self.jobs = JobSet(
            device,
            self.pages,
            self.adapters,
            self.counters,
            emit=self._outbox.append,
            send=self._commands.append,
        )
        self._serving = Serving(
            info,
            self.requests,
            self.versions,
            self.counters,
            end_tokens=end_tokens,
            text_stream=text_stream,
            emit=self._outbox.append,
            send=self._commands.append,
        )
        self._keep_profile = keep_profile
        self.slo = Slo(ttft_s=config.ttft_s, tpot_s=config.tpot_s or default_tpot_s(latency))
        self.num_steps = 0
        self.last_plan = Plan()
        self.last_result: StepResult | None = None  # of the last plan; None if that ran nothing, or the device failed
        self._step: tuple[View, Plan, StepBatch, float] | None = None  # under way, with the moment when it began
        self._max_step_rows = config.max_step_rows
        self._numbers = count()

    # -- questions --------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Another one begins without a history."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy, self._history = policy, policy.make_history()

    @property
    def pool(self) -> PagePool:
        return self.pages.pool

    @property
    def cache(self) -> KvCache:
        return self.pages.cache

    @property
    def versions(self) -> AdapterVersions:
        """Adapters that requests can name."""
        return self.adapters.versions

    @property
    def num_preemptions(self) -> int:
        """How often a request's pages were taken."""
        return self.requests.num_preemptions

    @property
    def records(self) -> deque[RequestRecord]:
        """How recent requests were served, the last one last; a reader may clear it."""
        return self._serving.records

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end every request, of those that the model has."""
        return self._serving.end_tokens

    @property
    def has_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self.requests or self._outbox or self.jobs.num_running)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return EngineStats(
            num_running=len(self.requests.running),
            num_waiting=len(self.requests.waiting),
            num_jobs=sum(not job.is_terminal for job in self.jobs.values()),
            num_jobs_running=self.jobs.num_running,
            num_steps=self.num_steps,
            num_tokens_trained=self.jobs.num_tokens_trained,
            num_preemptions=self.num_preemptions,
            num_packs_dropped=self.jobs.num_packs_dropped,
            num_pages=self.pool.num_pages,
            num_pages_free=self.pool.num_free,
            num_pages_by_owner=self.pool.num_pages_by_owner(),
            margin=self.latency.margin,
            num_slos_clamped=self._serving.num_slos_clamped,
            slo=self.slo,
            joined_jobs=self.jobs.joined,
        )

    def check_integrity(self) -> None:
        """Assert that every page is free or owned, and that those owned are the requests' and packs'."""
        self.requests.check_integrity()
        held = {page for each in self.requests.running.values() if each.sequence for page in each.sequence.pages}
        self.pages.check_integrity(held, self.jobs.packs)

    # -- requests -------------------------------------------------------------------

    def add_tokens(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        slo: Slo | None = None,
        request_id: str | None = None,
        arrival_s: float | None = None,
        tenant: str = "",
    ) -> str:
        """Queue a request; its chunks come out of `step`. Returns its name.

        Args:
            adapter: a name (its newest version as of now) or `name@step`; None for the bare model.
            arrival_s: when it came, if that was before now.
            tenant: whose it is, for policies that share the device among tenants.

        Raises:
            RequestError: it could never be served. AdapterError: there is no such adapter.
        """
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self.requests:
            raise RequestError(f"there is a request {name!r} already")
        self._serving.add(
            name,
            prompt,
            params,
            adapter=adapter,
            slo=slo,
            default_slo=self.slo,
            latency=self.latency,
            arrival_s=self.device.clock.now() if arrival_s is None else arrival_s,
            tenant=tenant,
        )
        return name

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was there."""
        was_there = self._serving.cancel(request)
        self._drop_unread_versions()
        return was_there

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        """End one sequence of a request whose first `num_tokens` tokens turned out to be all that is wanted of it; its
        last chunk, without tokens, comes with the next step. Returns whether it was there.
        """
        was_there = self._serving.stop(request, index, num_tokens)
        self._drop_unread_versions()
        return was_there

    # -- adapters -------------------------------------------------------------------

    def load_adapter(self, name: str, directory: str) -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError if there is one already, or for its files."""
        self._check_name(name)
        return self.adapters.load(name, directory)

    def ensure_adapter(self, name: str, directory: str) -> None:
        """Have an adapter that lies on disk on the device, too; it may be evicted when others are used instead.

        Raises:
            AdapterError: it cannot be loaded.
        """
        if name not in self.versions:
            self.load_adapter(name, directory)
        self.adapters.keep_from_disk(name)
        self._drop_unread_versions()

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        """The two halves of `ensure_adapter`, for callers that must not wait for a disk: whose `read` any thread may
        call, beside steps, before `finish_load`. None if there is nothing to load.

        Raises:
            AdapterError: it cannot have this name.
        """
        if name in self.versions:
            return None
        self._check_name(name)
        return self.adapters.begin_load(name, directory)

    def finish_load(self, load: AdapterLoad) -> None:
        """Serve what was read."""
        self.adapters.finish_load(load)
        self.adapters.keep_from_disk(load.name)
        self._drop_unread_versions()

    def unload_adapter(self, name: str) -> None:
        """No new request finds it; those that use it run to their end."""
        self.adapters.unload(name)
        self._drop_unread_versions()

    def save_adapter(self, label: str, directory: str | Path) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        self.device.execute(SaveAdapter(self.versions.resolve(label).key, str(directory)))

    def _check_name(self, name: str) -> None:
        if not name or "@" in name:
            raise AdapterError(f"{name!r} is no name for an adapter: it must not be empty, nor have an @")
        if self.jobs.is_made_by_a_job(name):
            raise AdapterError(f"a job is making the adapter {name!r}")
        if name in self.versions:
            raise AdapterError(f"there is an adapter {name!r} already")

    # -- jobs -----------------------------------------------------------------------

    def submit_examples(
        self,
        examples: Sequence[Example],
        config: TuningConfig,
        *,
        adapter: PeftFields | Mapping[str, Any] | str | None = None,
        name: str | None = None,
        validation: Sequence[Example] = (),
        job_id: str | None = None,
        checkpoint: str | Path | None = None,
        tenant: str = "",
        alone_until_step: int = 0,
    ) -> str:
        """Start a job, or resume one; its events come out of `step`. Returns its id.

        Args:
            adapter: a fresh one of this kind (or the fields of PEFT's adapter_config.json), or the label of one to
                continue training.
            name: of the adapter that it publishes (default: the job's id).
            checkpoint: a directory that `Checkpoint.write` made of the same job, with the same data and configuration;
                then `adapter` is not used.
            tenant: whose it is, for policies that share the device among tenants.
            alone_until_step: until this optimizer step no step of the engine works for another job as well, so that
                what it dies of is known.

        Raises:
            JobError, AdapterError: it could never be run, or the checkpoint is another job's; the message says what
            would be right.
        """
        job_id = job_id if job_id is not None else f"job-{next(self._numbers)}"
        name = name if name is not None else job_id
        if job_id in self.jobs:
            raise JobError(f"there is a job {job_id!r} already")
        if not examples:
            raise JobError("a job needs examples")
        self._check_name(name)
        check_examples([*examples, *validation], self.device.info)
        start = trainer_start(job_id, config, examples, self.versions, adapter=adapter, checkpoint=checkpoint)
        position = None if checkpoint is None else read_position(checkpoint)
        job = self.jobs.submit(
            job_id, name, config, examples, validation, start=start, position=position, tenant=tenant
        )
        job.alone_until_step = alone_until_step
        self.jobs.catch_up()
        return job_id

    def job(self, job_id: str) -> Job:
        """JobError if there is none."""
        return self.jobs.find(job_id)

    def pause_job(self, job_id: str) -> None:
        """Let it rest where it is; its pack goes, and is begun again later."""
        self.jobs.pause(job_id)

    def resume_job(self, job_id: str) -> None:
        """The inverse."""
        self.jobs.resume(job_id)

    def cancel_job(self, job_id: str) -> None:
        """End it at once; versions that it has published stay."""
        self.jobs.cancel(job_id)

    def checkpoint(self, job_id: str) -> Checkpoint:
        """A copy of a job after its last whole optimizer step (of one that is over, without the optimizer's state)."""
        return self.jobs.checkpoint(job_id)

    def forget_job(self, job_id: str) -> None:
        """Let go of a job that is over; versions that it has published stay."""
        self.jobs.forget(job_id)

    # -- the loop -------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan, run, apply once; returns what came of it. Without work it does nothing."""
        self.begin_step()
        return self.finish_step()

    def begin_step(self) -> bool:
        """Plan, and have the device begin. Returns whether there is a step; `finish_step` is to follow.

        Between the two, requests may be added, cancelled and stopped; nothing else may be asked, and nothing at all of
        an engine that is recorded. A GPU, and a device in another process, work meanwhile; a CPU in this process has
        done its work when this returns. Today nobody makes use of it: `step`, and with it the server, call one right
        after the other, and what overlaps with steps is reading and writing files, in threads.
        """
        if self._step is not None:  # the caller was interrupted before it could finish
            self._finish()
        self.jobs.catch_up()
        started_s = self.device.clock.now()
        view, plan = self._plan(started_s)
        self.last_plan, self.last_result = plan, None
        self.jobs.count_turn()
        if plan.runs_nothing:
            self.flush_commands()
            return False
        commands = tuple(self._commands.popleft() for _ in range(len(self._commands)))
        batch = build_batch(self.num_steps, plan, self.requests, self.jobs, commands)
        self._step = view, plan, batch, started_s
        try:
            self.device.submit(batch)
        except BaseException as error:
            self._step = None
            self._take_back(batch, error)
            raise
        return True

    def flush_commands(self) -> None:
        """Tell the device now what it would be told with the next step, such as that copies of jobs are not needed any
        more; for callers that see no step coming.
        """
        self.jobs.settle()
        while self._commands:
            self.device.execute(self._commands[0])
            self._commands.popleft()  # if the caller is interrupted before, it is done again: none of them minds

    def finish_step(self) -> list[Event]:
        """Wait for the device, and book what came of the step. Returns all events so far."""
        self._finish()
        events = self._outbox.copy()
        self._outbox.clear()
        return events

    def _advance(self) -> None:
        """A step; what came of it is in the outbox."""
        self.begin_step()
        self._finish()

    def _finish(self) -> None:
        if self._step is not None:
            (view, plan, batch, started_s), self._step = self._step, None
            try:
                result = self.device.collect()
            except BaseException as error:
                self._close_running()  # tokens that nobody has heard of may count as used there
                self.jobs.abandon(batch, error)
                raise
            now_s = self.device.clock.now()
            self.last_result = result
            if result.failure is None:
                self._apply(plan, batch, result, started_s, now_s)
                self._remember(view, plan, result)
            else:
                self._recover(batch, result, now_s)
        self._drop_unread_versions()
        if not (self.requests or self.jobs.num_running):
            self.flush_commands()  # there may be no further step

    def _take_back(self, batch: StepBatch, error: BaseException) -> None:
        """A step could not begin. Which of its commands, and of its requests' pages, the device knows of is not known:
        all requests that run are closed, and opened again when they are admitted.
        """
        lost = [command for command in batch.commands if not isinstance(command, OpenRequest)]
        self._commands.extendleft(reversed(lost))
        self._close_running()
        self.jobs.abandon(batch, error)

    def _close_running(self) -> None:
        """What the device knows of the requests that run is not known: they are to be opened again."""
        for request in reversed(list(self.requests.running.values())):  # the first one is to be the first again
            self._commands.append(self.requests.preempt(request))

    def _plan(self, now_s: float) -> tuple[View, Plan]:
        """What the policy sees, and what it says, as far as it can be done.

        A pack may fail to begin although its pages are there, when they are not side by side. Then the policy is asked
        again without that job: it had given it rows, which others can use.
        """
        failed: frozenset[str] = frozenset()
        while True:
            view = self._view(now_s, without=failed)
            planned = self.policy.plan(view, self.latency)
            plan = carry_out(
                planned,
                self.requests,
                self.jobs,
                policy=self.config.policy,
                send=self._commands.append,
                max_requests=self.config.max_requests,
                num_units=self.device.info.num_units,
            )
            begun = [self.jobs[job] for job in planned.begin if job in self.jobs]
            new = frozenset(job.id for job in begun if not job.has_pack) - failed
            if not new:
                return view, plan
            failed |= new

    def _view(self, now_s: float, *, without: frozenset[str]) -> View:
        return View(
            now_s=now_s,
            requests=self.requests.running_views(),
            waiting=self.requests.waiting_views(),
            jobs=self.jobs.views(now_s, without=without),
            tenants=self.counters.views(),
            num_free_pages=self.pages.num_available,
            num_pages=self.pool.num_pages,
            block_tokens=self.config.block_tokens,
            ttft_s=self.slo.ttft_s,
            tpot_s=self.slo.tpot_s,
            max_rows=self._max_step_rows,
            max_requests=self.config.max_requests,
            need=self._serving.need.view(now_s),
            num_units=self.device.info.num_units,
            history=self._history,
        )

    # -- what came of it ----------------------------------------------------------------

    def _apply(self, plan: Plan, batch: StepBatch, result: StepResult, started_s: float, now_s: float) -> None:
        self.num_steps += 1
        self._max_step_rows = min(self.config.max_step_rows, self._max_step_rows + 1 + self._max_step_rows // 64)
        parameters = [self.jobs[job_id].costs.counts.num_parameters for job_id in plan.updates]
        observe(self.latency, plan, result, parameters, step_s=now_s - started_s)
        taken = taken_of(plan, step_s=result.seconds, forward_s=result.forward_s)
        self._serving.taken_time.add(taken, started_s=started_s, ended_s=now_s)
        self._serving.need.add_step(plan, taken, started_s=started_s, ended_s=now_s)
        self._serving.apply(batch, result, started_s=started_s, now_s=now_s)
        self.jobs.apply(batch, result, started_s=started_s, now_s=now_s)
        self._follow_device()

    def _remember(self, view: View, plan: Plan, result: StepResult) -> None:
        """What the policy wants to know of a step."""
        if self._history is None:
            return
        self._history.add(
            StepView(
                view=view,
                latency=self.latency,
                plan=plan,
                forward_s=result.forward_s,
                loss_s=result.loss_s,
                backward_s=result.backward_s,
                update_s=result.update_s,
                beside_s=result.beside_s,
                num_tasklets=result.num_tasklets,
                num_beside=result.num_beside,
                num_running=len(self.requests.running),
                num_waiting=len(self.requests.waiting),
                num_arrived=self.requests.num_arrived,
                num_ended=self.requests.num_ended,
            )
        )

    def _follow_device(self) -> None:
        """The default SLO, and the profile on disk, by what steps really take."""
        if self.num_steps % _STEPS_PER_LOOK:
            return
        tpot_s = self.config.tpot_s or default_tpot_s(self.latency)
        if abs(tpot_s - self.slo.tpot_s) > _SLO_CHANGE * self.slo.tpot_s:
            self.slo = Slo(ttft_s=self.config.ttft_s, tpot_s=tpot_s)
        # Ever more rarely: after 512 steps, 1024, 2048, …
        if self.num_steps & (self.num_steps - 1) or self._keep_profile is None:
            return
        if (profile := self.latency.settled_profile()) is not None:
            self._keep_profile(profile)

    def _recover(self, batch: StepBatch, result: StepResult, now_s: float) -> None:
        """The device ran out of memory: jobs make room first, then steps get smaller, then a request fails."""
        assert result.failure is not None
        if self.jobs.recover(batch, result, now_s):
            return
        num_rows = sum(len(rows.tokens) for rows in batch.requests)
        if num_rows > 1:
            self._max_step_rows = num_rows // 2
            return
        self._serving.fail(batch, f"the device ran out of memory: {result.failure.message}")

    # -- endings ----------------------------------------------------------------------

    def _drop_unread_versions(self) -> None:
        if self._step is None and (unread := self.adapters.take_unread()):
            self._commands.extend(unread)
            self.flush_commands()  # at once: they are large, and there may be no further step

    def _take(self, is_wanted: Callable[[Event], bool]) -> list[Event]:
        """Events out of the outbox; the others stay for the next step."""
        events = [event for event in self._outbox if is_wanted(event)]
        self._outbox[:] = [event for event in self._outbox if not is_wanted(event)]
        return events
