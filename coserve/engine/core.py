"""The step loop: plan, run, apply. Requests, jobs and pages by number; a device has the tensors.

A policy decides: who is admitted, preempted, begun and dropped, and which rows run. The engine checks that pages allow
it, tells the device, and books what came of it. It is plain Python, and deterministic: the same inputs, clock readings
and results of the device give the same steps.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from coserve.devices.base import Device
from coserve.devices.messages import Command, SaveAdapter, StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.checkpoint import Checkpoint, read_position
from coserve.engine.checks import check_examples, check_request
from coserve.engine.config import EngineConfig
from coserve.engine.job import Job, JobEvent
from coserve.engine.job_set import JobSet, PeftFields, trainer_start
from coserve.engine.page_broker import PageBroker
from coserve.engine.records import EngineStats, RequestRecord, record_of
from coserve.engine.request import Chunk, Request
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import AdapterLoad, ServedAdapters
from coserve.engine.step_batch import build_batch, carry_out, observe
from coserve.engine.text import TextStream
from coserve.engine.versions import AdapterVersion, AdapterVersions
from coserve.errors import AdapterError, JobError, RequestError
from coserve.memory.kv_cache import KvCache
from coserve.memory.pages import PagePool
from coserve.scheduling.attainment import JobsTime, RecentNeed, jobs_seconds
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel, Profile
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies import make_policy
from coserve.scheduling.slo import Slo, default_tpot_s, feasible_slo
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
        text_stream: Callable[[Sequence[int], SamplingParams], TextStream] | None = None,
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
            emit=lambda event: self._outbox.append(event),
            send=self._commands.append,
        )
        self._keep_profile = keep_profile
        self.slo = Slo(ttft_s=config.ttft_s, tpot_s=config.tpot_s or default_tpot_s(latency))
        self.records: deque[RequestRecord] = deque(maxlen=_NUM_RECORDS)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_slos_clamped = 0
        self._jobs_time, self._need = JobsTime(), RecentNeed()
        self.last_plan = Plan()
        self._step: tuple[Plan, StepBatch, float] | None = None  # under way, with the moment when it began
        self.end_tokens = frozenset(token for token in end_tokens if 0 <= token < info.vocab_size)
        self._text_stream = text_stream
        self._max_step_rows = config.max_step_rows
        self._numbers = count()
        self._seeds = Random(0)

    # -- questions --------------------------------------------------------------------

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
    def has_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self.requests or self._outbox or self.jobs.has_running)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return EngineStats(
            num_running=len(self.requests.running),
            num_waiting=len(self.requests.waiting),
            num_jobs=sum(not job.is_terminal for job in self.jobs.values()),
            num_steps=self.num_steps,
            num_tokens_trained=self.jobs.num_tokens_trained,
            num_preemptions=self.num_preemptions,
            num_packs_dropped=self.jobs.num_packs_dropped,
            num_pages=self.pool.num_pages,
            num_pages_free=self.pool.num_free,
            num_pages_by_owner=self.pool.num_pages_by_owner(),
            margin=self.latency.margin,
            num_slos_clamped=self.num_slos_clamped,
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
        check_request(prompt, params, self.device.info, has_text=self._text_stream is not None)
        version = None if adapter is None else self.versions.resolve(adapter)
        base_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        now_s = self.device.clock.now()
        asked_slo = slo or self.slo
        most = max(1, params.max_tokens)
        slo = feasible_slo(asked_slo, self.slo, self.latency, num_prompt_tokens=len(prompt), max_tokens=most)
        self.num_slos_clamped += slo != asked_slo
        members: list[Request] = []
        for index in range(params.n):
            request = Request(
                id=f"{name}/{index}",
                request=name,
                index=index,
                prompt=prompt,
                params=params,
                seed=base_seed + index,
                version=version,
                slo=slo,
                asked_slo=asked_slo,
                arrival_s=now_s if arrival_s is None else arrival_s,
                end_tokens=frozenset() if params.ignore_eos else self.end_tokens,
                text=None if self._text_stream is None else self._text_stream(prompt, params),
                tenant=tenant,
                prefix_source=members[0] if members else None,
                jobs_time=self._jobs_time,
            )
            if version is not None:
                self.versions.hold(version)
            members.append(request)
        self.requests.add(name, members)
        return name

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was there."""
        members = self.requests.members(request)
        for member in members:
            self._outbox.append(member.end("cancelled"))
            self._leave(member)
        self._drop_unread_versions()
        return bool(members)

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        """End one sequence of a request whose first `num_tokens` tokens turned out to be all that is wanted of it; its
        last chunk, without tokens, comes with the next step. Returns whether it was there.
        """
        for member in self.requests.members(request):
            if member.index == index:
                self._outbox.append(member.end("stop"))
                self.records.append(replace(record_of(member), num_output_tokens=num_tokens))
                self._leave(member)
                self._drop_unread_versions()
                return True
        return False

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
    ) -> str:
        """Start a job, or resume one; its events come out of `step`. Returns its id.

        Args:
            adapter: a fresh one of this kind (or the fields of PEFT's adapter_config.json), or the label of one to
                continue training.
            name: of the adapter that it publishes (default: the job's id).
            checkpoint: a directory that `Checkpoint.write` made of the same job, with the same data and configuration;
                then `adapter` is not used.
            tenant: whose it is, for policies that share the device among tenants.

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
        if checkpoint is not None:
            start = trainer_start(job_id, config, examples, checkpoint=checkpoint)
        elif isinstance(adapter, str):
            start = trainer_start(job_id, config, examples, version=self.versions.resolve(adapter).key)
        elif adapter is not None:
            start = trainer_start(job_id, config, examples, adapter=adapter)
        else:
            raise JobError("a job needs an adapter to begin with, or a checkpoint to resume from")
        position = None if checkpoint is None else read_position(checkpoint)
        job = self.jobs.submit(
            job_id, name, config, examples, validation, start=start, position=position, tenant=tenant
        )
        if position is not None and position.num_steps_done:
            self.jobs.follow_update(job, self.device.clock.now(), evaluated=position.evaluated)
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
        """Plan, and have the device begin: it may work while the caller does something else. Returns whether there is a
        step; `finish_step` must follow before anything else.
        """
        assert self._step is None, "the step before has not been finished"
        started_s = self.device.clock.now()
        plan = self._plan(started_s)
        self.last_plan = plan
        if plan.runs_nothing:
            self._send_commands()
            return False
        commands = tuple(self._commands.popleft() for _ in range(len(self._commands)))
        batch = build_batch(self.num_steps, plan, self.requests, self.jobs, commands)
        self._step = plan, batch, started_s
        self.device.submit(batch)
        return True

    def finish_step(self) -> list[Event]:
        """Wait for the device, and book what came of the step. Returns all events so far."""
        self._finish()
        return self._take(lambda event: True)

    def _advance(self) -> None:
        """A step; what came of it is in the outbox."""
        self.begin_step()
        self._finish()

    def _finish(self) -> None:
        if self._step is not None:
            (plan, batch, started_s), self._step = self._step, None
            try:
                result = self.device.collect()
            except BaseException as error:
                self.jobs.abandon(batch, error)
                raise
            now_s = self.device.clock.now()
            if result.failure is None:
                self._apply(plan, batch, result, started_s, now_s)
            else:
                self._recover(batch, result, now_s)
        self._drop_unread_versions()

    def _plan(self, now_s: float) -> Plan:
        """What the policy says, as far as it can be done.

        A pack may fail to begin although its pages are there, when they are not side by side. Then the policy is asked
        again without that job: it had given it rows, which others can use.
        """
        failed: frozenset[str] = frozenset()
        while True:
            planned = self.policy.plan(self._view(now_s, without=failed), self.latency)
            plan = carry_out(
                planned, self.requests, self.jobs, send=self._commands.append, max_requests=self.config.max_requests
            )
            self.num_preemptions += len(planned.preempt)
            new = frozenset(job for job in planned.begin if not self.jobs[job].has_pack) - failed
            if not new:
                return plan
            failed |= new

    def _view(self, now_s: float, *, without: frozenset[str]) -> View:
        jobs = self.jobs.views(now_s)
        return View(
            now_s=now_s,
            requests=self.requests.running_views(),
            waiting=self.requests.waiting_views(),
            jobs=tuple([job for job in jobs if job.id not in without]) if without else jobs,
            tenants=self.counters.views(),
            num_free_pages=self.pages.num_available,
            num_pages=self.pool.num_pages,
            block_tokens=self.config.block_tokens,
            ttft_s=self.slo.ttft_s,
            tpot_s=self.slo.tpot_s,
            max_rows=self._max_step_rows,
            max_requests=self.config.max_requests,
            need=self._need.view(now_s),
        )

    # -- what came of it ----------------------------------------------------------------

    def _apply(self, plan: Plan, batch: StepBatch, result: StepResult, started_s: float, now_s: float) -> None:
        self.num_steps += 1
        self._max_step_rows = min(self.config.max_step_rows, self._max_step_rows + 1 + self._max_step_rows // 64)
        parameters = [self.jobs[job_id].costs.counts.num_parameters for job_id in plan.updates]
        observe(self.latency, plan, result, parameters, step_s=now_s - started_s)
        jobs_s = jobs_seconds(
            plan,
            forward_s=result.forward_s,
            loss_s=result.loss_s,
            backward_s=result.backward_s,
            update_s=result.update_s,
        )
        self._jobs_time.add(jobs_s, started_s=started_s, ended_s=now_s)
        for rows in batch.requests:
            request = self.requests.running[rows.request]
            request.commit(len(rows.tokens), result.prompts.get(rows.request, ()))
            if not rows.samples:
                continue
            chunk = request.accept(result.tokens[rows.request], now_s)
            self.counters.charge(request.tenant, output=1)
            self._outbox.append(chunk)
            self._note(request, now_s)
            if chunk.finish_reason is not None:
                self.records.append(record_of(request))
                self._leave(request)
        self.jobs.apply(batch, result, now_s)
        self._follow_device()

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

    def _note(self, request: Request, now_s: float) -> None:
        """What a request needed by itself that has its first token, or has ended."""
        if request.num_output <= 1:
            ttft_s = now_s - request.arrival_s - request.jobs_s_before
            self._need.add_first_token(now_s, ttft_s / request.slo.ttft_s)
        elif request.finish_reason is not None and request.first_token_s is not None:
            decoding_s = now_s - request.first_token_s - request.jobs_s
            self._need.add_end(now_s, decoding_s / (request.num_output - 1) / request.slo.tpot_s)

    def _recover(self, batch: StepBatch, result: StepResult, now_s: float) -> None:
        """The device ran out of memory: jobs make room first, then steps get smaller, then a request fails."""
        assert result.failure is not None
        if self.jobs.recover(batch, result, now_s):
            return
        num_rows = sum(len(rows.tokens) for rows in batch.requests)
        if num_rows > 1:
            self._max_step_rows = num_rows // 2
            return
        for rows in batch.requests:
            request = self.requests.running[rows.request]
            self._outbox.append(request.end("error", f"the device ran out of memory: {result.failure.message}"))
            self._leave(request)

    # -- endings ----------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        """A request is over: everything that it holds goes back."""
        if (closed := self.requests.remove(request)) is not None:
            self._commands.append(closed)
        if request.version is not None:
            self.versions.release(request.version)

    def _drop_unread_versions(self) -> None:
        if unread := self.adapters.take_unread():
            self._commands.extend(unread)
            self._send_commands()  # at once: they are large, and there may be no further step

    def _send_commands(self) -> None:
        """Without a step to go with, commands go by themselves."""
        while self._commands:
            self.device.execute(self._commands.popleft())

    def _take(self, is_wanted: Callable[[Event], bool]) -> list[Event]:
        """Events out of the outbox; the others stay for the next step."""
        events = [event for event in self._outbox if is_wanted(event)]
        self._outbox = [event for event in self._outbox if not is_wanted(event)]
        return events
