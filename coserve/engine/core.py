"""The step loop: plan, run, apply. It owns requests, jobs and pages; it has no tensors, and does not ask what runs it.

Requests have priority over jobs for memory as for time: a request is admitted once its whole prompt fits (FlexLLM
section 7), and where pages are missing, a job's pack is dropped and begun again later, its optimizer's state
untouched. Only when no pack is left, the youngest request is preempted: its pages go back, and its tokens are computed
again when there is room.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

from coserve.adapters.base import AdapterConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.checkpoint import Checkpoint, read_position
from coserve.engine.config import EngineConfig
from coserve.engine.job import EventKind, Job, JobEvent
from coserve.engine.request import Chunk, Request, Slo
from coserve.engine.runner import (
    LossRows,
    RequestRows,
    Runner,
    StepFailedError,
    StepResult,
    Tasklets,
    Update,
    WindowRows,
    Work,
)
from coserve.engine.text import TextStream
from coserve.engine.versions import AdapterVersion, AdapterVersions
from coserve.errors import AdapterError, BudgetError, DeviceMemoryError, JobError, RequestError
from coserve.memory.activations import PooledMemory
from coserve.memory.kv_cache import KvCache, kv_page_bytes
from coserve.memory.pages import PagePool
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies import make_policy
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

Event = Chunk | JobEvent

# TPOT objective where none is given: so many times a decode step alone.
_DEFAULT_TPOT_STEPS = 2.5
# Tokens in the cache of the request that stands for a decode step alone.
_SOLO_CONTEXT = 512
# A pack waits until there are so many pages per running request beside it: it would be dropped at once otherwise.
_SPARE_PAGES = 4
_NUM_RECORDS = 10_000


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """How a finished sequence was served. tpot_s: mean over its tokens behind the first; None if there was but one."""

    request: str
    adapter: str | None
    arrival_s: float
    ttft_s: float
    tpot_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo

    @property
    def attained(self) -> bool:
        """Whether both objectives were held."""
        return self.ttft_s <= self.slo.ttft_s and (self.tpot_s is None or self.tpot_s <= self.slo.tpot_s)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine at this moment. num_tokens_trained: rows of packs whose gradients are in, of all jobs here."""

    num_running: int
    num_waiting: int
    num_jobs: int
    num_steps: int
    num_tokens_trained: int
    num_preemptions: int
    num_packs_dropped: int
    num_pages: int
    num_pages_free: int
    num_pages_by_owner: dict[str, int]
    margin: float


class EngineCore:
    """Requests of token ids, and jobs of tokenized examples, on a runner."""

    def __init__(self, runner: Runner, latency: LatencyModel, config: EngineConfig, *, num_pages: int) -> None:
        backbone = runner.backbone
        self.runner, self.latency, self.config = runner, latency, config
        self.policy = make_policy(config.policy)
        self.pool = PagePool(num_pages, kv_page_bytes(backbone, config.block_tokens), backbone.device)
        self.cache = KvCache(backbone, self.pool, block_tokens=config.block_tokens)
        self.activations = PooledMemory(self.pool, evict=self.cache.evict)
        self.versions = AdapterVersions()
        self.single_decode_step_s = latency.decode_s(num_requests=1, context=_SOLO_CONTEXT)
        self.slo = Slo(ttft_s=config.ttft_s, tpot_s=config.tpot_s or _DEFAULT_TPOT_STEPS * self.single_decode_step_s)
        self.jobs: dict[str, Job] = {}
        self.records: deque[RequestRecord] = deque(maxlen=_NUM_RECORDS)
        self.num_steps = 0
        self.num_preemptions = 0
        self.last_plan = Plan()
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}  # in the order of arrival
        self._requests: dict[str, list[Request]] = {}  # by the name of the request, those that are not over
        self._outbox: list[Event] = []
        self._num_tokens_forgotten = self._num_drops_forgotten = 0
        self._on_disk: OrderedDict[str, None] = OrderedDict()  # adapters that can be had again, unused longest first
        self._max_step_rows = config.max_step_rows
        self._numbers = count()
        self._seeds = Random(0)

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
    ) -> str:
        """Queue a request; its chunks come out of `step`. Returns its name.

        Args:
            adapter: a name (its newest version as of now) or `name@step`; None for the bare model.
            arrival_s: when it came, if that was before now.

        Raises:
            RequestError: it could never be served. AdapterError: there is no such adapter.
        """
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self._requests:
            raise RequestError(f"there is a request {name!r} already")
        self._check(prompt, params)
        version = None if adapter is None else self.versions.resolve(adapter)
        base_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        now_s = self.runner.clock.now()
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
                slo=slo or self.slo,
                arrival_s=now_s if arrival_s is None else arrival_s,
                end_tokens=frozenset() if params.ignore_eos else self._end_tokens(),
                text=self._text_stream(prompt, params),
                prefix_source=members[0] if members else None,
            )
            if version is not None:
                self.versions.hold(version)
            members.append(request)
        self._requests[name] = members
        self._waiting.extend(members)
        return name

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was there."""
        members = list(self._requests.get(request, ()))
        for member in members:
            self._outbox.append(member.end("cancelled"))
            self._leave(member)
        return bool(members)

    def _end_tokens(self) -> frozenset[int]:
        """The tokens that end every request."""
        return frozenset()

    def _text_stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream | None:
        """What makes text of tokens, if there is a tokenizer."""
        if params.stop:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        return None

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        architecture = self.runner.backbone.architecture
        if not prompt:
            raise RequestError("the prompt has no tokens")
        if wrong := [token for token in prompt if not 0 <= token < architecture.vocab_size]:
            raise RequestError(f"the prompt has token {wrong[0]}; the model has {architecture.vocab_size} tokens")
        length = len(prompt) + params.max_tokens
        if length > architecture.max_positions:
            raise RequestError(
                f"{len(prompt)} tokens of prompt and {params.max_tokens} to come are {length}; "
                f"the model has {architecture.max_positions} positions"
            )
        if (pages := self.cache.num_pages(length)) > self.pool.num_pages:
            raise RequestError(
                f"{length} tokens need {pages} pages; there are {self.pool.num_pages}: give the engine more memory"
            )
        try:
            params.check_vocabulary(architecture.vocab_size)
        except ValueError as error:
            raise RequestError(str(error)) from None

    # -- adapters -------------------------------------------------------------------

    def load_adapter(self, name: str, directory: str) -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError if there is one already, or for its files."""
        self._check_name(name)
        key = self.versions.new_key(name, 0)
        num_bypasses = self.runner.load_adapter(key, directory)
        return self.versions.publish(name, 0, key, num_bypasses=num_bypasses)

    def ensure_adapter(self, name: str, directory: str) -> None:
        """Have an adapter that lies on disk on the device, too; it may be evicted when others are used instead.

        Of those, at most `max_adapters` stay (those that are being read, until they are not): the one whose use was
        asked for longest ago goes first.

        Raises:
            AdapterError: it cannot be loaded.
        """
        if name not in self.versions:
            self.load_adapter(name, directory)
        self._on_disk[name] = None
        self._on_disk.move_to_end(name)
        while len(self._on_disk) > self.config.max_adapters:
            self.unload_adapter(next(iter(self._on_disk)))

    def unload_adapter(self, name: str) -> None:
        """No new request finds it; those that use it go on to their end."""
        self.versions.unload(name)
        self._on_disk.pop(name, None)
        self._drop_unread_versions()

    def _check_name(self, name: str) -> None:
        if not name or "@" in name:
            raise AdapterError(f"{name!r} is no name for an adapter: it must not be empty, nor have an @")
        if any(job.name == name and not job.is_terminal for job in self.jobs.values()):
            raise AdapterError(f"a job is making the adapter {name!r}")
        if name in self.versions:
            raise AdapterError(f"there is an adapter {name!r} already")

    def _drop_unread_versions(self) -> None:
        for key in self.versions.take_gone():
            self.runner.drop_version(key)

    # -- jobs -----------------------------------------------------------------------

    def submit_examples(
        self,
        examples: Sequence[Example],
        config: TuningConfig,
        *,
        adapter: AdapterConfig | str | None = None,
        name: str | None = None,
        validation: Sequence[Example] = (),
        job_id: str | None = None,
        checkpoint: str | Path | None = None,
    ) -> str:
        """Start a job, or go on with one; its events come out of `step`. Returns its id.

        Args:
            adapter: a fresh one of this kind, or the label of one to go on training.
            name: of the adapter that it publishes (default: the job's id).
            checkpoint: a directory that `Checkpoint.write` made of the same job, with the same data and configuration;
            then `adapter` is not used.

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
        self._check_examples([*examples, *validation])
        position = None if checkpoint is None else read_position(checkpoint)
        start: AdapterConfig | str | Path
        if checkpoint is not None:
            start = Path(checkpoint)
        elif isinstance(adapter, AdapterConfig):
            start = adapter
        elif adapter is not None:
            start = self.versions.resolve(adapter).key
        else:
            raise JobError("a job needs an adapter to begin with, or a checkpoint to go on from")
        mean_context_len = sum(len(e.tokens) ** 2 for e in examples) / sum(len(e.tokens) for e in examples) / 2
        trainer = self.runner.trainer(start, config, mean_context_len=mean_context_len, memory=self.activations)
        try:
            config = self._with_pack_size(
                config, trainer.num_pages, max(len(e.tokens) for e in [*examples, *validation])
            )
            job = Job(id=job_id, name=name, config=config, examples=examples, validation=validation, trainer=trainer)
            if position is not None:
                job.resume(position)
                self._num_tokens_forgotten -= job.num_tokens_trained  # another engine's
        except JobError:
            trainer.close()
            raise
        self.jobs[job_id] = job
        if position is not None and position.num_steps_done:
            self._follow_update(job, self.runner.clock.now(), evaluated=position.evaluated)
        return job_id

    def job(self, job_id: str) -> Job:
        """JobError if there is none."""
        if job_id not in self.jobs:
            raise JobError(f"there is no job {job_id!r}; there are: {', '.join(self.jobs) or 'none'}")
        return self.jobs[job_id]

    def pause_job(self, job_id: str) -> None:
        """Let it rest where it is; its pack goes, and is begun again later."""
        job = self._living(job_id)
        if job.has_pack:
            self._drop_pack(job)
        job.state = "paused"

    def resume_job(self, job_id: str) -> None:
        """The inverse."""
        self._living(job_id).state = "running"

    def cancel_job(self, job_id: str) -> None:
        """End it at once; versions that it has published stay."""
        job = self._living(job_id)
        job.end("cancelled")
        self._outbox.append(self._job_event(job, "cancelled"))

    def checkpoint(self, job_id: str) -> Checkpoint:
        """A copy of a job after its last whole optimizer step (of one that is over, without the optimizer's state)."""
        job = self.job(job_id)
        return Checkpoint(position=job.position(), state=job.trainer.state())

    def forget_job(self, job_id: str) -> None:
        """Let go of a job that is over; versions that it has published stay."""
        job = self.job(job_id)
        if not job.is_terminal:
            raise JobError(f"job {job_id!r} is {job.state}: cancel it first")
        self._num_tokens_forgotten += job.num_tokens_trained
        self._num_drops_forgotten += job.num_drops
        del self.jobs[job_id]

    def _living(self, job_id: str) -> Job:
        job = self.job(job_id)
        if job.is_terminal:
            raise JobError(f"job {job_id!r} is over: it has {job.state}")
        return job

    def _check_examples(self, examples: Sequence[Example]) -> None:
        architecture = self.runner.backbone.architecture
        for index, example in enumerate(examples):
            if len(example.tokens) > architecture.max_positions:
                raise JobError(
                    f"example {index} has {len(example.tokens)} tokens; the model has {architecture.max_positions} "
                    "positions: lower max_sequence_length"
                )
            if not example.num_trained:
                raise JobError(f"example {index} has no token to train on")
            if not all(0 <= token < architecture.vocab_size for token in (min(example.tokens), max(example.tokens))):
                raise JobError(f"example {index} has a token beyond the model's {architecture.vocab_size}")

    def _with_pack_size(self, config: TuningConfig, num_pages: Callable[[int], int], longest: int) -> TuningConfig:
        """The configuration with packs that the pool can hold."""
        if config.max_pack_tokens is None:
            rows = config.pack_tokens
            while rows > longest and num_pages(rows) > self.pool.num_pages // 2:
                rows //= 2
            config = replace(config, max_pack_tokens=max(rows, longest))
        needed = num_pages(max(config.pack_tokens, longest))
        if needed > self.pool.num_pages:
            raise JobError(
                f"a pack of {max(config.pack_tokens, longest)} tokens needs {needed} pages; there are "
                f"{self.pool.num_pages}: lower max_pack_tokens or max_sequence_length, or give the engine more memory"
            )
        return config

    # -- the loop -------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self._requests or self._outbox or any(job.state == "running" for job in self.jobs.values()))

    def step(self) -> list[Event]:
        """Plan, run, apply once; returns what came of it. Without work it does nothing."""
        self._advance()
        return self._take(lambda event: True)

    def _advance(self) -> None:
        """A step; what came of it is in the outbox."""
        started_s = self.runner.clock.now()
        self._admit()
        self._grow()
        self._begin_packs()
        plan = self.policy(self._view(started_s), self.latency)
        self.last_plan = plan
        if not plan.is_empty:
            self._run(plan, started_s)
        self._drop_unread_versions()

    def _take(self, is_wanted: Callable[[Event], bool]) -> list[Event]:
        """Events out of the outbox; the others stay for the next step."""
        events = [event for event in self._outbox if is_wanted(event)]
        self._outbox = [event for event in self._outbox if not is_wanted(event)]
        return events

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_jobs=sum(not job.is_terminal for job in self.jobs.values()),
            num_steps=self.num_steps,
            num_tokens_trained=self._num_tokens_forgotten + sum(job.num_tokens_trained for job in self.jobs.values()),
            num_preemptions=self.num_preemptions,
            num_packs_dropped=self._num_drops_forgotten + sum(job.num_drops for job in self.jobs.values()),
            num_pages=self.pool.num_pages,
            num_pages_free=self.pool.num_free,
            num_pages_by_owner=self.pool.num_pages_by_owner(),
            margin=self.latency.margin,
        )

    def check_integrity(self) -> None:
        """Assert that every page is free or owned, and that those owned are the requests' and packs'."""
        self.cache.check_integrity()
        held = {page for request in self._running.values() if request.sequence for page in request.sequence.pages}
        kept = self.pool.num_pages_by_owner().get("kv", 0) - self.cache.prefixes.num_evictable
        assert kept == len(held), f"{kept} pages are in use, requests hold {len(held)}"
        assert all(request.sequence is None for request in self._waiting)
        assert {r.id for group in self._requests.values() for r in group} == {
            *self._running,
            *(request.id for request in self._waiting),
        }
        if not any(job.has_pack for job in self.jobs.values()):
            assert not self.pool.num_pages_by_owner().get("activations")

    # -- memory ---------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests their pages, first come first served, as long as whole prompts fit."""
        blocked: list[Request] = []
        while self._waiting and len(self._running) < self.config.max_requests:
            request = self._waiting.popleft()
            if not request.may_start:
                blocked.append(request)
            elif not self._open(request):
                self._waiting.appendleft(request)
                break
        self._waiting.extendleft(reversed(blocked))

    def _open(self, request: Request) -> bool:
        version = request.version.key if request.version else ""
        sequence = self.cache.open(request.tokens, version=version, share=not request.scores_prompt)
        num_rows = len(request.tokens) - sequence.length
        # Those that run will want a page each, soon.
        needed = sequence.num_pages_missing(num_rows) + len(self._running)
        if needed > self.cache.num_available and not self._reclaim(needed):
            sequence.close()
            return False
        sequence.reserve(num_rows)
        request.sequence = sequence
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.length
        self._running[request.id] = request
        return True

    def _grow(self) -> None:
        """Make sure that every request that runs has pages for its next rows."""
        for request in list(self._running.values()):
            while request.sequence is not None and request.sequence.num_pages_missing(request.num_rows):
                needed = request.sequence.num_pages_missing(request.num_rows)
                if needed <= self.cache.num_available or self._reclaim(needed):
                    request.sequence.reserve(request.num_rows)
                else:
                    # Of those that came at once, the one that was admitted last.
                    self._preempt(max(reversed(self._running.values()), key=lambda running: running.arrival_s))

    def _reclaim(self, num_pages: int) -> bool:
        """Drop packs, those that lose least first, until so many pages are available. Drops none in vain."""
        packs = sorted((job for job in self.jobs.values() if job.has_pack), key=lambda job: job.pack_progress)
        held = self.pool.num_pages_by_owner().get("activations", 0)
        if not packs or self.cache.num_available + held < num_pages:
            return False
        for job in packs:
            self._drop_pack(job)
            if self.cache.num_available >= num_pages:
                return True
        return self.cache.num_available >= num_pages

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it waits at the head of the queue, to be computed again."""
        assert request.sequence is not None
        request.sequence.close()
        request.sequence = None
        request.num_preemptions += 1
        self.num_preemptions += 1
        del self._running[request.id]
        self._waiting.appendleft(request)

    def _begin_packs(self) -> None:
        """Give jobs the memory of their next packs, as far as requests do not want it."""
        if len(self._running) < self.config.max_requests and any(request.may_start for request in self._waiting):
            return
        for job in self._jobs_by_need():
            if (pack := job.wants_pack) is None:
                continue
            pages = job.trainer.num_pages(pack.num_rows) + _SPARE_PAGES * len(self._running)
            if pages > self.cache.num_available:
                continue
            try:
                job.begin_pack()
            except (BudgetError, DeviceMemoryError):  # enough pages, but not side by side; or no memory beside them
                continue

    def _drop_pack(self, job: Job) -> None:
        job.drop_pack()
        self._outbox.append(self._job_event(job, "pack_dropped"))

    def _jobs_by_need(self) -> list[Job]:
        """Jobs that run, the one that has been served least first."""
        return sorted((job for job in self.jobs.values() if job.state == "running"), key=lambda job: job.num_rows_run)

    # -- plan, run, apply -------------------------------------------------------------

    def _view(self, now_s: float) -> View:
        return View(
            now_s=now_s,
            requests=tuple([request.view() for request in self._running.values()]),
            jobs=tuple([view for job in self._jobs_by_need() if (view := job.view(now_s)) is not None]),
            num_free_pages=self.cache.num_available,
            ttft_s=self.slo.ttft_s,
            tpot_s=self.slo.tpot_s,
            max_rows=self._max_step_rows,
        )

    def _work(self, plan: Plan) -> Work:
        requests, windows = [], []
        for item, kind, _, num_rows in plan.rows:
            if kind == "window":
                windows.append(WindowRows(self.jobs[item].trainer, num_rows))
            else:
                request = self._running[item]
                requests.append(RequestRows(request, num_rows, num_rows == request.num_rows))
        # Rows of one adapter side by side, so that its bypasses run once for all of them.
        requests.sort(key=lambda rows: rows.request.version.key if rows.request.version else "")
        jobs = self.jobs
        return Work(
            requests=requests,
            windows=windows,
            losses=[LossRows(jobs[job].trainer, rows) for job, rows in plan.losses],
            tasklets=[Tasklets(jobs[job].trainer, rows, number) for job, rows, number in plan.tasklets],
            updates=[
                Update(jobs[job].trainer, jobs[job].sums.num_trained, jobs[job].order.num_steps) for job in plan.updates
            ],
        )

    def _run(self, plan: Plan, started_s: float) -> None:
        work = self._work(plan)
        try:
            result = self.runner.run(work)
        except StepFailedError as error:
            self._recover(plan, work, error)
            return
        except BaseException as error:
            # Whatever it was: the step's packs and updates are in an unknown state. Everything else is as it was.
            for job_id in plan.updates:
                self._fail(self.jobs[job_id], f"the device failed within an optimizer step: {error!r}")
            self._drop_planned(plan)
            raise
        now_s = self.runner.clock.now()
        self.num_steps += 1
        self._max_step_rows = min(self.config.max_step_rows, self._max_step_rows + 1 + self._max_step_rows // 64)
        self._learn(plan, result, now_s - started_s)
        self._apply_requests(work, result, now_s)
        self._apply_jobs(plan, result, now_s)

    def _apply_requests(self, work: Work, result: StepResult, now_s: float) -> None:
        tokens = iter(result.tokens)
        for (request, _, _), scored in zip(work.requests, result.prompts, strict=False):
            request.accept_prompt(scored)
        for request, num_rows, sampled in work.requests:
            assert request.sequence is not None
            request.sequence.commit(num_rows, request.tokens)
            if not sampled:
                continue
            chunk = request.accept(next(tokens), now_s)
            self._outbox.append(chunk)
            if chunk.finish_reason is not None:
                self._record(request)
                self._leave(request)

    def _apply_jobs(self, plan: Plan, result: StepResult, now_s: float) -> None:
        for job_id, norm in zip(plan.updates, result.norms, strict=True):
            self._apply_update(self.jobs[job_id], norm, now_s)
        for job in [self.jobs[item] for item in plan.moved_jobs]:
            job.count_rows(now_s)
            if job.finish_pack_if_done():
                self._outbox.append(job.finish_evaluation(now_s))
                self._go_on(job, now_s)

    def _apply_update(self, job: Job, norm: float | None, now_s: float) -> None:
        self._outbox.append(job.finish_update(norm, now_s))
        if job.error is not None:
            self._fail(job, job.error)
        else:
            self._follow_update(job, now_s)

    def _follow_update(self, job: Job, now_s: float, *, evaluated: bool = False) -> None:
        """What an optimizer step brings with it: a version, an evaluation (unless that was done), the next step."""
        step, config = job.num_steps_done, job.config
        last = step == job.order.num_steps
        if config.live:
            self._publish(job, transient=not last)
        elif last or (config.publish_every_steps and step % config.publish_every_steps == 0):
            self._publish(job)
        if job.is_terminal:
            return
        due = last or (config.evaluate_every_steps and step % config.evaluate_every_steps == 0)
        if not (due and not evaluated and job.start_evaluation()):
            self._go_on(job, now_s)

    def _go_on(self, job: Job, now_s: float) -> None:
        """The next optimizer step, or the end."""
        if not job.start_step():
            job.end("succeeded")
            self._outbox.append(self._job_event(job, "succeeded"))

    def _publish(self, job: Job, *, transient: bool = False) -> None:
        key = self.versions.new_key(job.name, job.num_steps_done)
        try:
            job.trainer.publish(key)
        except DeviceMemoryError as error:
            self._fail(job, f"out of memory where {job.name}@{job.num_steps_done} was to be kept: {error}")
            return
        version = self.versions.publish(
            job.name, job.num_steps_done, key, num_bypasses=job.trainer.counts.num_bypasses, transient=transient
        )
        self._outbox.append(self._job_event(job, "version", version=version.label))

    def _learn(self, plan: Plan, result: StepResult, step_s: float) -> None:
        """Tell the latency model what the step took."""
        latency = self.latency
        if plan.rows:
            num_rows = sum(rows.rows for rows in plan.rows)
            windows = any(rows.kind == "window" for rows in plan.rows)
            latency.observe("forward", num_rows, windows, predicted_s=plan.forward_s, measured_s=result.forward_s)
        for num_rows in {piece.rows.bit_length(): piece.rows for piece in plan.losses}.values():
            latency.observe("loss", num_rows, False, predicted_s=plan.loss_s, measured_s=result.loss_s)
        # A section's time teaches once for each size in it, however many jobs have pieces of that size.
        sizes = {tasklets.rows.bit_length(): tasklets.rows for tasklets in plan.tasklets}
        for num_rows in sizes.values():
            latency.observe("backward", num_rows, False, predicted_s=plan.backward_s, measured_s=result.backward_s)
        numbers = [self.jobs[job].trainer.counts.num_parameters for job in plan.updates]
        sizes = {number.bit_length(): number for number in numbers}
        for number in sizes.values():
            latency.observe("update", number, False, predicted_s=plan.update_s, measured_s=result.update_s)
        latency.observe_step(predicted_s=plan.predicted_s, measured_s=step_s)

    def _recover(self, plan: Plan, work: Work, error: StepFailedError) -> None:
        """The device ran out of memory: jobs make room first, then steps get smaller, then a request fails.

        Optimizer steps that had been made stand; those that had not begun are made later.
        """
        message, now_s, num_made = str(error), self.runner.clock.now(), len(error.norms)
        for job_id, norm in zip(plan.updates, error.norms, strict=False):
            self._apply_update(self.jobs[job_id], norm, now_s)
        if error.broken_update:
            self._fail(self.jobs[plan.updates[num_made]], f"out of memory within an optimizer step: {message}")
        num_packs = self._drop_planned(plan)
        num_rows = sum(rows.num_rows for rows in work.requests)
        if num_packs or plan.updates:
            return
        if num_rows > 1:
            self._max_step_rows = num_rows // 2
            return
        for rows in work.requests:
            self._outbox.append(rows.request.end("error", f"the device ran out of memory: {message}"))
            self._leave(rows.request)

    def _fail(self, job: Job, message: str) -> None:
        job.error = message
        job.end("failed")
        self._outbox.append(self._job_event(job, "failed", message=message))

    def _drop_planned(self, plan: Plan) -> int:
        """Drop the packs that took part in a failed step; returns how many there were."""
        for name in plan.moved_jobs:
            self._drop_pack(self.jobs[name])
        return len(plan.moved_jobs)

    # -- endings ----------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        """A request is over: everything that it holds goes back."""
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
            del self._running[request.id]
        else:
            self._waiting.remove(request)
        if request.version is not None:
            self.versions.release(request.version)
        members = self._requests[request.request]
        members.remove(request)
        if not members:
            del self._requests[request.request]

    def _record(self, request: Request) -> None:
        assert request.first_token_s is not None
        later = request.num_output - 1
        self.records.append(
            RequestRecord(
                request=request.request,
                adapter=request.version.name if request.version else None,
                arrival_s=request.arrival_s,
                ttft_s=request.first_token_s - request.arrival_s,
                tpot_s=(request.last_token_s - request.first_token_s) / later if later else None,
                num_prompt_tokens=len(request.prompt),
                num_output_tokens=request.num_output,
                slo=request.slo,
            )
        )

    def _job_event(self, job: Job, kind: EventKind, *, version: str | None = None, message: str = "") -> JobEvent:
        return JobEvent(
            job=job.id,
            kind=kind,
            step=job.num_steps_done,
            now_s=self.runner.clock.now(),
            version=version,
            message=message,
        )
