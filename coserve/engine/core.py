"""The engine without text: requests of token ids, adapters and jobs are added, asked about and ended; `step` runs them.

Requests, jobs and pages by number; a device has the tensors. It is plain Python, and deterministic: the same inputs,
clock readings and results of the device give the same steps. The loop that takes them is `coserve.engine.step_loop`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from coserve.devices.base import Device
from coserve.devices.matching import Vocabulary
from coserve.devices.messages import OpenGrammar, SaveAdapter, SetVocabulary, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.answers import Answers, Decode
from coserve.engine.checkpoint import Checkpoint, TakenCopy
from coserve.engine.checks import check_adapter_name, check_examples
from coserve.engine.command_queue import CommandQueue
from coserve.engine.config import EngineConfig
from coserve.engine.handed_over import HandedBlocks, HandedOver
from coserve.engine.host_swap import HostSwap
from coserve.engine.job import Job, JobEvent
from coserve.engine.job_set import JobSet
from coserve.engine.job_start import PeftFields, make_start, path_of
from coserve.engine.owed_commands import OwedCommands
from coserve.engine.page_broker import PageBroker
from coserve.engine.records import EngineStats, RequestRecord
from coserve.engine.request import Chunk
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import AdapterLoad, ServedAdapters
from coserve.engine.serving import Serving, TextStreamMaker
from coserve.engine.stats import take_stats
from coserve.engine.step_loop import StepLoop
from coserve.engine.versions import AdapterVersion, AdapterVersions
from coserve.errors import JobError, RequestError
from coserve.memory.kv_cache import KvCache
from coserve.memory.pages import PagePool
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan
from coserve.scheduling.policies import Policy, make_policy
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Combination, Shard

Event = Chunk | JobEvent

# Within which answers to a validation set should be there: the time of a batch.
_ANSWERS_S = 86_400.0


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
        decode: Decode | None = None,
        keep_profile: Callable[[Profile], None] | None = None,
    ) -> None:
        """end_tokens: ids that end every request. text_stream: makes text of a request's tokens, given its prompt and
        params; without it there is none, and no stop strings. decode: the text of answers to validation sets.
        keep_profile: told what the device's profile should be if steps have long shown that it is something else.
        """
        info, policy = device.info, make_policy(config.policy, config.policy_settings)
        self.device, self.latency, self.config = device, latency, config
        self.counters = TokenCounters(policy.token_weights)
        self.pages = PageBroker(
            num_pages=info.num_pages,
            page_bytes=info.page_bytes,
            block_tokens=info.block_tokens,
            max_window_bytes=config.weight_window_bytes,
        )
        self.swap = HostSwap(self.pages.cache, info, latency)
        self._handed = HandedOver(self.pages.cache)
        self.requests = RequestQueue(self.pages.cache, self.swap, self._handed, self.counters)
        owed = OwedCommands(device, self.swap)
        self.adapters = ServedAdapters(device, self.swap, owed, most=config.max_adapters)
        self._outbox: list[Event] = []
        commands = CommandQueue()
        emit, send = self._outbox.append, commands.send
        self._serving = Serving(
            info,
            self.requests,
            self.versions,
            self.counters,
            end_tokens=end_tokens,
            text_stream=text_stream,
            emit=self._emit,
            send=send,
        )
        self._answers = Answers(
            self.adapters,
            max_positions=info.max_positions,
            add=self._ask,
            cancel=self._serving.cancel,
            decode=decode,
            end_tokens=self._serving.end_tokens,
        )
        self.jobs = JobSet(
            device,
            self.pages,
            self.swap,
            self.adapters,
            self.counters,
            latency,
            owed=owed,
            answers=self._answers,
            emit=emit,
            send=send,
        )
        self._loop = StepLoop(
            device,
            latency,
            config,
            policy=policy,
            pages=self.pages,
            swap=self.swap,
            handed=self._handed,
            requests=self.requests,
            serving=self._serving,
            adapters=self.adapters,
            jobs=self.jobs,
            counters=self.counters,
            commands=commands,
            keep_profile=keep_profile,
        )
        self._numbers = count()
        self.vocabulary: Vocabulary | None = None  # what tokens stand for, once it is known

    # -- questions --------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Another one begins without a history."""
        return self._loop.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._loop.policy = policy

    @property
    def slo(self) -> Slo:
        """Of requests that bring none; unless the config says it, its TPOT follows what steps take."""
        return self._loop.slo

    @slo.setter
    def slo(self, slo: Slo) -> None:
        self._loop.slo = slo

    @property
    def num_steps(self) -> int:
        """Steps that the device has done."""
        return self._loop.num_steps

    @property
    def last_plan(self) -> Plan:
        """What the last step was to do, as far as it could be done."""
        return self._loop.last_plan

    @property
    def last_result(self) -> StepResult | None:
        """Of the last plan; None if that ran nothing, or the device failed."""
        return self._loop.last_result

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
        return take_stats(
            loop=self._loop,
            requests=self.requests,
            serving=self._serving,
            jobs=self.jobs,
            pages=self.pages,
            swap=self.swap,
            latency=self.latency,
        )

    def check_integrity(self) -> None:
        """Assert that every page is free or owned, and that those owned are the requests' and packs'; likewise on the
        host.
        """
        self.requests.check_integrity()
        self.swap.check_integrity([*self.requests.waiting, *self.jobs.on_host, *self.adapters.on_host])
        self._handed.check_integrity(set(self.requests.waiting))
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
        priority: int = 0,
        batch_due_s: float | None = None,
    ) -> str:
        """Queue a request; its chunks come out of `step`. Returns its name.

        Args:
            adapter: a name (its newest version as of now) or `name@step`; None for the bare model.
            arrival_s: when it came, if that was before now.
            tenant: whose it is, for policies that share the device among tenants.
            priority: the lowest goes first.
            batch_due_s: of batch work, which runs in what requests leave over: when it should be done. It has no SLO.

        Raises:
            RequestError: it could never be served. AdapterError: there is no such adapter.
        """
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self.requests:
            raise RequestError(f"there is a request {name!r} already")
        if params.grammar is not None:
            if self.vocabulary is None:
                self._find_vocabulary()
            self.device.execute(OpenGrammar(params.grammar))
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
            priority=priority,
            batch_due_s=batch_due_s,
        )
        return name

    def _ask(self, name: str, prompt: Sequence[int], params: SamplingParams, adapter: str, tenant: str) -> None:
        """A question of a job's validation set, as batch work."""
        now_s = self.device.clock.now()
        self._serving.add(
            name,
            prompt,
            params,
            adapter=adapter,
            slo=None,
            default_slo=self.slo,
            latency=self.latency,
            arrival_s=now_s,
            tenant=tenant,
            batch_due_s=now_s + _ANSWERS_S,
        )

    def _emit(self, chunk: Chunk) -> None:
        if not self._answers.take(chunk):
            self._outbox.append(chunk)

    def hold(self, request: str) -> None:
        """A request that waits is not to start before `arrive`: another instance computes its prompt
        (`coserve.handover`).
        """
        if (first := self.requests.first(request)) is not None:
            self._handed.hold(first.id)

    def arrive(self, request: str, blocks: HandedBlocks | None) -> None:
        """What came of it, in a file that must stay until the request waits no more; None: nothing, and its prompt is
        computed here. No error if it is not there any more.
        """
        if (first := self.requests.first(request)) is not None:
            self._handed.arrive(first.id, blocks)

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """What tokens stand for, before the first request with a grammar; see `Vocabulary`. RequestError if the device
        has no library for grammars.
        """
        vocabulary = Vocabulary(tuple(pieces), tuple(special), tuple(sorted(self.end_tokens)))
        self.device.execute(SetVocabulary(vocabulary))
        self.vocabulary = vocabulary

    def _find_vocabulary(self) -> None:
        """For those that know it from elsewhere, to use it now."""
        raise RequestError("a grammar needs a tokenizer, and this model has none")

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was there."""
        was_there = self._serving.cancel(request)
        self._loop.drop_unread_versions()
        return was_there

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        """End one sequence of a request whose first `num_tokens` tokens turned out to be all that is wanted of it; its
        last chunk, without tokens, comes with the next step. Returns whether it was there.
        """
        was_there = self._serving.stop(request, index, num_tokens)
        self._loop.drop_unread_versions()
        return was_there

    # -- adapters -------------------------------------------------------------------

    def load_adapter(self, name: str, directory: str, model: str = "") -> AdapterVersion:
        """Serve an adapter in PEFT's format as `name`; AdapterError if there is one already, or for its files. model:
        that it is of, one of the config's `trainable_models`: then it can be trained further, not served.
        """
        check_adapter_name(name, self.jobs.values(), self.versions)
        path = path_of(model, self.config.trainable_models)
        return self.adapters.load(name, directory, model=model, path=path)

    def ensure_adapter(self, name: str, directory: str, model: str = "") -> None:
        """Have an adapter that lies on disk on the device, too; it may be evicted when others are used instead.

        Raises:
            AdapterError: it cannot be loaded. JobError: there is no such model.
        """
        if name not in self.versions:
            self.load_adapter(name, directory, model)
        self.adapters.keep_from_disk(name)
        self._loop.drop_unread_versions()

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        """The two halves of `ensure_adapter`, for callers that must not wait for a disk: whose `read` any thread may
        call, beside steps, before `finish_load`. None if there is nothing to load.

        Raises:
            AdapterError: it cannot have this name.
        """
        if name in self.versions:
            return None
        check_adapter_name(name, self.jobs.values(), self.versions)
        return self.adapters.begin_load(name, directory)

    def finish_load(self, load: AdapterLoad) -> None:
        """Serve what was read."""
        self.adapters.finish_load(load)
        self.adapters.keep_from_disk(load.name)
        self._loop.drop_unread_versions()

    def unload_adapter(self, name: str) -> None:
        """No new request finds it; those that use it run to their end."""
        self.adapters.unload(name)
        self._loop.drop_unread_versions()

    def save_adapter(self, label: str, directory: str | Path) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        key = self.versions.resolve(label).key
        self.adapters.bring_back(key)
        self.device.execute(SaveAdapter(key, str(directory)))

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
        model: str = "",
        shard: Shard | None = None,
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
            model: that it trains, one of the config's `trainable_models`; "" for the one that serves. The adapter that
                comes of it cannot be served here: it is saved, and served with its own model.
            shard: this is one node's part of it, and the caller brings it together with the others.

        Raises:
            JobError, AdapterError, ModelError: it could never be run, or the checkpoint is another job's; the message
                says what would be right.
        """
        job_id = job_id if job_id is not None else f"job-{next(self._numbers)}"
        name = name if name is not None else job_id
        if job_id in self.jobs:
            raise JobError(f"there is a job {job_id!r} already")
        if not examples:
            raise JobError("a job needs examples")
        check_adapter_name(name, self.jobs.values(), self.versions)
        if not model:
            check_examples([*examples, *validation], self.device.info)
        start = make_start(
            job_id,
            config,
            examples,
            self.versions,
            adapter=adapter,
            checkpoint=checkpoint,
            model=model,
            trainable_models=self.config.trainable_models,
            shard=shard,
        )
        if start.trainer.version is not None:
            self.adapters.bring_back(start.trainer.version)
        job = self.jobs.submit(job_id, name, config, examples, validation, start=start, tenant=tenant)
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

    def contribution(self, job_id: str) -> TakenCopy:
        """What the other nodes of a job are to have, when its event says that it is due."""
        return self.jobs.contribution(job_id)

    def combine(self, job_id: str, combination: Combination) -> None:
        """Have a job take in what its nodes have contributed, which `ReadContributions` has read."""
        self.jobs.combine(job_id, combination)

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
        return self._loop.begin()

    def finish_step(self) -> list[Event]:
        """Wait for the device, and book what came of the step. Returns all events so far."""
        self._loop.finish()
        events = self._outbox.copy()
        self._outbox.clear()
        return events

    def flush_commands(self) -> None:
        """Tell the device now what the next step would, such as copies to drop; for callers that see no step coming."""
        self._loop.flush_commands()

    def _advance(self) -> None:
        """A step; what came of it is in the outbox."""
        self.begin_step()
        self._loop.finish()

    def _take(self, is_wanted: Callable[[Event], bool]) -> list[Event]:
        """Events out of the outbox; the others stay for the next step."""
        events = [event for event in self._outbox if is_wanted(event)]
        self._outbox[:] = [event for event in self._outbox if not is_wanted(event)]
        return events
