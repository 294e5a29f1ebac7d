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
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.step_messages import StepResult
from coserve.engine.checks import check_adapter_name
from coserve.engine.config import EngineConfig
from coserve.engine.grammars import FindPieces
from coserve.engine.jobs.answers import Decode
from coserve.engine.jobs.checkpoint import Checkpoint, TakenCopy
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.opening import PeftFields, path_of
from coserve.engine.outbox import Event
from coserve.engine.parts import EngineParts
from coserve.engine.records import EngineStats, RequestRecord
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.served_adapters import AdapterLoad, AdapterVersion, AdapterVersions
from coserve.engine.serving import TextStreamMaker
from coserve.engine.stats import take_stats
from coserve.memory.kv_cache import KvCache
from coserve.memory.pages import PagePool
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan
from coserve.scheduling.policies import Policy
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Combination, Shard


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
        find_pieces: FindPieces | None = None,
        keep_profile: Callable[[Profile], None] | None = None,
    ) -> None:
        """end_tokens: ids that end every request. text_stream: makes text of a request's tokens, given its prompt and
        params; without it there is none, and no stop strings. decode: the text of answers to validation sets.
        find_pieces: what tokens stand for, asked with the first grammar unless `use_vocabulary` has told.
        keep_profile: told what the device's profile should be if steps have long shown that it is something else.
        """
        self.device, self.latency, self.config = device, latency, config
        self._parts = parts = EngineParts(
            device,
            latency,
            config,
            end_tokens=end_tokens,
            text_stream=text_stream,
            decode=decode,
            find_pieces=find_pieces,
            keep_profile=keep_profile,
        )
        self.requests, self.adapters, self.jobs = parts.requests, parts.adapters, parts.jobs
        self.pages, self.swap, self.counters = parts.pages, parts.swap, parts.counters
        self.loop, self.outbox, self.calibration = parts.loop, parts.outbox, parts.calibration
        self.log, self._serving, self.grammars = parts.log, parts.serving, parts.grammars
        self._numbers = count()

    # -- questions --------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Another one begins without a history."""
        return self.loop.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.loop.policy = policy

    @property
    def slo(self) -> Slo:
        """Of requests that bring none; unless the config says it, or it was set, its TPOT follows what steps take."""
        return self._parts.default_slo.value

    @slo.setter
    def slo(self, slo: Slo) -> None:
        self._parts.default_slo.value = slo

    @property
    def num_steps(self) -> int:
        """Steps that the device has done."""
        return self.loop.num_steps

    @property
    def last_plan(self) -> Plan:
        """What the last step was to do, as far as it could be done."""
        return self.loop.last_plan

    @property
    def last_result(self) -> StepResult | None:
        """Of the last plan; None if that ran nothing, or the device failed."""
        return self.loop.last_result

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
    def vocabulary(self) -> Vocabulary | None:
        """What tokens stand for, once that is known."""
        return self.grammars.vocabulary

    @property
    def has_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self.requests or self.outbox or self.jobs.num_running)

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return take_stats(self._parts)

    def check_integrity(self) -> None:
        """Assert that every page, here and on the host, is free, or owned by somebody who knows of it."""
        self._parts.check_integrity()

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
        without_jobs: bool = False,
    ) -> str:
        """Queue a request; its chunks come out of `step`. Returns its name.

        Args:
            adapter: a name (its newest version as of now) or `name@step`; None: the bare model. priority: lowest first.
            arrival_s: when it came, if that was before now. tenant: its owner. without_jobs: no job steps beside it.
            batch_due_s: of batch work, which runs in what requests leave over: when it should be done. It has no SLO.

        Raises:
            RequestError: it could never be served. AdapterError: there is no such adapter.
        """
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        self._serving.add(
            name,
            prompt,
            params,
            adapter=adapter,
            slo=slo,
            arrival_s=arrival_s,
            tenant=tenant,
            priority=priority,
            batch_due_s=batch_due_s,
            without_jobs=without_jobs,
        )
        return name

    def hold(self, request: str) -> None:
        """A request that waits is not to start before `arrive`: another instance computes its prompt
        (`coserve.handover`).
        """
        self.requests.hold(request)

    def arrive(self, request: str, blocks: ImportedBlocks | None) -> None:
        """Deliver the blocks of a held request's prompt; None means that there are none, and that it is computed here.

        The file must exist until the request is admitted. It is no error if the request is not there any more.
        """
        self.requests.arrive(request, blocks)

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """What tokens stand for, before the first request with a grammar; see `Vocabulary`. RequestError if the device
        has no library for grammars.
        """
        self.grammars.use_vocabulary(pieces, special)

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was there."""
        was_there = self._serving.cancel(request)
        self.loop.drop_unread_versions()
        return was_there

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        """End one sequence of a request whose first `num_tokens` tokens turned out to be all that is wanted of it; its
        last chunk, without tokens, comes with the next step. Returns whether it was there.
        """
        was_there = self._serving.stop(request, index, num_tokens)
        self.loop.drop_unread_versions()
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
        self.loop.drop_unread_versions()

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
        self.loop.drop_unread_versions()

    def unload_adapter(self, name: str) -> None:
        """No new request finds it; those that use it run to their end."""
        self.adapters.unload(name)
        self.loop.drop_unread_versions()

    def save_adapter(self, label: str, directory: str | Path) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        self.adapters.save(label, str(directory))

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
            checkpoint: a directory that `Checkpoint.write` made of the same job, with the same data, configuration and
                `adapter` (which need not be said where PEFT's directory says all of it, as of LoRA).
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
        job = self._parts.opener.open(
            job_id,
            name if name is not None else job_id,
            config,
            examples,
            validation,
            adapter=adapter,
            checkpoint=checkpoint,
            tenant=tenant,
            model=model,
            shard=shard,
            others=self.jobs,
        )
        job.alone_until_step = alone_until_step
        self.jobs.add(job)
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
        return self.loop.begin()

    def finish_step(self) -> list[Event]:
        """Wait for the device, and book what came of the step. Returns all events so far."""
        self.loop.finish()
        return self.outbox.take_all()

    def flush_commands(self) -> None:
        """Tell the device now what the next step would: where none is coming, or an unrecorded command follows."""
        self.log.flush()
