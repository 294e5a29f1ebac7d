"""The engine without text: it handles commands on requests of token ids, adapters and jobs, one
after the other.

It handles requests, jobs and pages by number; the device has the tensors. It is plain Python, and
deterministic: the same commands, clock readings and results of the device give the same steps. Its
step loop is `coserve.engine.step_loop`.
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, assert_never

from coserve.devices.base import Device
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.messages.steps import StepResult
from coserve.engine import commands
from coserve.engine.calibration import Calibration
from coserve.engine.checks import check_adapter_name
from coserve.engine.command_log import CommandLog
from coserve.engine.commands import (
    AdapterCommand,
    EngineCommand,
    JobCommand,
    JobExamples,
    JobStart,
    RequestCommand,
)
from coserve.engine.config import EngineConfig
from coserve.engine.grammars import FindPieces, Grammars
from coserve.engine.host_swap import HostSwap
from coserve.engine.jobs.answers import Answers, Decode
from coserve.engine.jobs.checkpoint import Checkpoint, DeviceCopy
from coserve.engine.jobs.job_set import JobSet
from coserve.engine.jobs.opening import JobOpener, trainable_model_path
from coserve.engine.outbox import Event, Outbox
from coserve.engine.page_manager import PageManager
from coserve.engine.records import EngineStats
from coserve.engine.request import Chunk
from coserve.engine.request_lifecycle import RequestLifecycle, TextStreamMaker
from coserve.engine.request_queue import RequestQueue
from coserve.engine.served_adapters import (
    AdapterLoad,
    AdapterVersion,
    ServedAdapters,
)
from coserve.engine.step_loop import StepLoop
from coserve.memory.pages.pack_pages import OWNER as PACK_OWNER
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan
from coserve.scheduling.policies import Policy, make_policy
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import DefaultSlo, Slo


class EngineCore:
    """Core of an engine: requests of token ids, and jobs of tokenized examples, on a device."""

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
        """Make the parts of an engine.

        Args:
            end_tokens: Ids that end every request.
            text_stream: Makes the text of a request's tokens, from its prompt and params; None: no
                text, no stop strings.
            decode: Decodes answers to validation sets.
            find_pieces: Returns what tokens stand for; called with the first grammar, unless
                `UseVocabulary` came before.
            keep_profile: Called with a corrected profile once measured step times have drifted from
                the device's.
        """
        self.device, self.latency, self.config = device, latency, config
        self._numbers = count()  # for requests and jobs that their callers have not named
        info, policy = device.info, make_policy(config.policy, config.policy_settings)
        self.outbox = Outbox()
        self._default_slo = DefaultSlo(latency, ttft_s=config.ttft_s, tpot_s=config.tpot_s)
        self.log = CommandLog(device)
        send = self.log.send
        self.calibration = Calibration(self.log, info, latency, self._default_slo, keep_profile)
        self.counters = TokenCounters(policy.token_weights)
        self.pages = PageManager(
            num_pages=info.num_pages,
            page_bytes=info.page_bytes,
            block_tokens=info.block_tokens,
            send=send,
            num_state_pages=info.num_state_pages,
            max_window_bytes=config.weight_window_bytes,
        )
        self.pool, self.cache = self.pages.pool, self.pages.cache
        self.swap = HostSwap(self.cache, info, latency, send)
        self.requests = RequestQueue(self.cache, self.swap, self.counters, send)
        self.adapters = ServedAdapters(
            device, self.log, self.swap, max_versions=config.max_adapters
        )
        self.versions = self.adapters.versions
        """Adapters that requests can name."""
        self.end_tokens = frozenset(token for token in end_tokens if 0 <= token < info.vocab_size)
        """Ids that end every request, of those that the model has."""
        self.grammars = Grammars(device, self.end_tokens, find_pieces)
        self._request_lifecycle = RequestLifecycle(
            device,
            self.requests,
            self.versions,
            self.counters,
            latency,
            self._default_slo,
            self.grammars,
            end_tokens=self.end_tokens,
            shares_prefixes=config.share_prefixes,
            text_stream=text_stream,
            emit=self._emit,
            send=send,
        )
        self.records = self._request_lifecycle.records
        """Records of recent requests, the last one last; a reader may clear them."""
        self._opener = JobOpener(
            device, self.pages, self.adapters, self.log, config.trainable_models
        )
        self._answers = Answers(self.adapters, self._request_lifecycle, device, decode=decode)
        self.jobs = JobSet(
            device,
            self.pages,
            self.swap,
            self.adapters,
            self.counters,
            latency,
            log=self.log,
            answers=self._answers,
            emit=self.outbox.put,
        )
        self.loop = StepLoop(
            device,
            latency,
            config,
            policy=policy,
            default_slo=self._default_slo,
            log=self.log,
            pages=self.pages,
            swap=self.swap,
            requests=self.requests,
            request_lifecycle=self._request_lifecycle,
            adapters=self.adapters,
            jobs=self.jobs,
            counters=self.counters,
            calibration=self.calibration,
        )

    def _emit(self, chunk: Chunk) -> None:
        # Chunks that answer validation questions are the jobs' own, and no caller waits for them.
        if not self._answers.take(chunk):
            self.outbox.put(chunk)

    # -- questions --------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Scheduling policy; one that is set begins without a history."""
        return self.loop.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.loop.policy = policy

    @property
    def slo(self) -> Slo:
        """Default SLO. Unless it is configured or set, its TPOT follows measured step times."""
        return self._default_slo.value

    @slo.setter
    def slo(self, slo: Slo) -> None:
        self._default_slo.value = slo

    @property
    def num_steps(self) -> int:
        """Return the number of steps that the device has done."""
        return self.loop.num_steps

    @property
    def last_plan(self) -> Plan:
        """Return the last plan, as far as it could be carried out."""
        return self.loop.last_plan

    @property
    def last_result(self) -> StepResult | None:
        """Return the result of the last plan; None if that ran nothing, or the device failed."""
        return self.loop.last_result

    @property
    def num_preemptions(self) -> int:
        """Return the number of preemptions of requests so far."""
        return self.requests.num_preemptions

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Return what tokens stand for, once that is known."""
        return self.grammars.vocabulary

    @property
    def has_requests(self) -> bool:
        """Return whether a request is waiting or running."""
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Return whether a step could bring anything."""
        return bool(self.requests or self.outbox or self.jobs.num_running)

    def stats(self) -> EngineStats:
        """Return counts as of now."""
        loop = self.loop
        requests = self.requests
        jobs = self.jobs
        pages = self.pages
        swap = self.swap
        owned, optimizers = pages.pool.num_pages_by_owner(), pages.cache.optimizers
        window_use = jobs.lifecycle.window_use
        # Pages of jobs that cannot be lent as they are, but are free once packs are dropped.
        num_held = owned.get(PACK_OWNER, 0) + optimizers.num_pages - optimizers.num_lendable
        num_batch_running, num_batch_waiting = requests.num_batch()
        return EngineStats(
            num_running=len(requests.running) - num_batch_running,
            num_waiting=len(requests.waiting) - num_batch_waiting,
            num_batch_running=num_batch_running,
            num_batch_waiting=num_batch_waiting,
            num_jobs=sum(not job.is_terminal for job in jobs.values()),
            num_jobs_running=jobs.num_running,
            num_steps=loop.num_steps,
            num_tokens_trained=jobs.num_tokens_trained,
            num_preemptions=requests.num_preemptions,
            num_packs_dropped=jobs.num_packs_dropped,
            num_pages=pages.pool.num_pages,
            num_pages_free=pages.pool.num_free,
            num_pages_by_owner=owned,
            num_pages_for_requests=pages.cache.num_available
            + num_held
            + requests.num_batch_pages(),
            slack=max(0.0, 1 - loop.last_slo_use.time),
            margin=self.latency.corrections.margin,
            num_slos_clamped=self._request_lifecycle.num_slos_clamped,
            slo=self._default_slo.value,
            joined_jobs=jobs.joined,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
            num_host_pages=swap.num_pages,
            num_host_pages_used=swap.num_pages_used,
            num_pages_moved=pages.num_moved,
            give_back_s=swap.give_back_s,
            num_weight_bytes_copied=window_use.num_bytes_copied,
            weights_wait_s=window_use.waited_s,
            num_tasklets_declined=window_use.num_declined,
            num_grammars=len(self.grammars),
            grammar_bytes_by_tenant=dict(self.grammars.num_bytes_by_tenant()),
        )

    def check_integrity(self) -> None:
        """Assert that every page, here and on the host, is free or has a known owner."""
        self.requests.check_integrity()
        self.swap.check_integrity(
            [*self.requests.waiting, *self.jobs.on_host, *self.adapters.on_host]
        )
        # A set: requests with a common prefix share its pages.
        held = {
            page
            for each in self.requests.running.values()
            if each.sequence
            for page in each.sequence.pages
        }
        self.pages.check_integrity(held, self.jobs.packs, self.jobs.with_optimizer)

    # -- commands -------------------------------------------------------------------

    def handle(self, command: EngineCommand, read: AdapterLoad | JobExamples | None = None) -> Any:
        """Handle a command between two steps.

        Args:
            read: What was read for the command beside steps: the examples of a job that starts, or
                an adapter.

        Returns:
            The result for a caller in this process, if the command has one: whether there is a step
                to `finish_step`, whether the request was there, the loaded `AdapterVersion`, the
                `Checkpoint`, the `DeviceCopy`.

        Raises:
            CoserveError: the command is refused, and has changed nothing.
        """
        if isinstance(command, commands.Step):
            return self.loop.begin()
        if isinstance(command, RequestCommand):
            return self._handle_request(command)
        if isinstance(command, AdapterCommand):
            assert not isinstance(read, JobExamples)
            return self._handle_adapter(command, read)
        if isinstance(command, JobCommand):
            assert not isinstance(read, AdapterLoad)
            return self._handle_job(command, read)
        self.log.flush()  # `FlushCommands`
        return None

    def _handle_request(self, command: RequestCommand) -> bool | None:
        """Return whether a request that was to end was there."""
        match command:
            case commands.AddRequest():
                self._request_lifecycle.add(
                    command.id,
                    command.prompt,
                    command.params,
                    adapter=None if command.adapter is None else command.adapter.name,
                    slo=command.slo,
                    arrival_s=command.arrival_s,
                    tenant=command.tenant,
                    priority=command.priority,
                    batch_due_s=command.batch_due_s,
                    without_jobs=command.without_jobs,
                )
            case commands.CancelRequest():
                was_there = self._request_lifecycle.cancel(command.id)
                # The request may have been the last reader of a version that has no name.
                self.loop.drop_unread_versions()
                return was_there
            case commands.StopSequence():
                was_there = self._request_lifecycle.stop(
                    command.id, command.index, command.num_tokens
                )
                self.loop.drop_unread_versions()
                return was_there
            case commands.HoldRequest():
                self.requests.hold(command.id)
            case commands.DeliverBlocks():
                self.requests.arrive(command.id, command.blocks)
            case commands.UseVocabulary():
                self.grammars.use_vocabulary(command.pieces, command.special)
            case _:
                assert_never(command)
        return None

    def _handle_adapter(
        self, command: AdapterCommand, load: AdapterLoad | None
    ) -> AdapterVersion | None:
        """Return the version of an adapter that was loaded."""
        match command:
            case commands.LoadAdapter():
                return self._load_adapter(command, load)
            case commands.UnloadAdapter():
                if command.name in self.versions:
                    self.adapters.unload(command.name)
                    self.loop.drop_unread_versions()
            case commands.SaveVersion():
                self.adapters.save(command.label, command.directory)
            case _:
                assert_never(command)
        return None

    def _handle_job(
        self, command: JobCommand, data: JobExamples | None
    ) -> Checkpoint | DeviceCopy | None:
        """Return the copy of a job that was taken."""
        match command:
            case commands.StartJob():
                assert data is not None
                self._start_job(command.job, data)
            case commands.PauseJob():
                self.jobs.pause(command.id)
            case commands.ResumeJob():
                self.jobs.resume(command.id)
            case commands.CancelJob():
                self.jobs.cancel(command.id)
            case commands.CombineJob():
                self.jobs.combine(command.id, command.combination)
            case commands.CopyCheckpoint():
                return self.jobs.lifecycle.checkpoint(self.jobs.find(command.id))
            case commands.CopyContribution():
                return self.jobs.lifecycle.contribution(self.jobs.find(command.id))
            case commands.ForgetJob():
                self.jobs.forget(command.id)
            case _:
                assert_never(command)
        return None

    def finish_step(self) -> list[Event]:
        """Wait for the device, and apply the result of the step. Returns all events so far."""
        self.loop.finish()
        return self.outbox.take_all()

    def begin_load(self, name: str, directory: str) -> AdapterLoad | None:
        """Return a load whose `read` any thread may call beside steps, before a `LoadAdapter` is
        handled with it; None if the adapter is loaded already.

        Raises:
            AdapterError: the adapter cannot have this name.
        """
        if name in self.versions:
            return None
        check_adapter_name(name, self.jobs.values(), self.versions)
        return self.adapters.begin_load(name, directory)

    def _load_adapter(
        self, command: commands.LoadAdapter, load: AdapterLoad | None
    ) -> AdapterVersion | None:
        name, directory = command.adapter.name, command.adapter.directory
        version: AdapterVersion | None = None
        # Read beside steps (`begin_load`): only the name is still to be published.
        if load is not None:
            version = self.adapters.finish_load(load)
        elif directory is not None and (command.stays or name not in self.versions):
            check_adapter_name(name, self.jobs.values(), self.versions)
            path = trainable_model_path(command.model, self.config.trainable_models)
            version = self.adapters.load(name, directory, model=command.model, path=path)
        if directory is not None and not command.stays:
            self.adapters.keep_from_disk(name)
            self.loop.drop_unread_versions()
        return version

    def _start_job(self, start: JobStart, data: JobExamples) -> None:
        adapter: dict[str, Any] | str | None = start.adapter
        # A job that continues an adapter names it in `start`; a fresh one has a configuration.
        if adapter is None and start.start is not None:
            adapter = start.start.name
        job = self._opener.open(
            start.id,
            start.name,
            start.config,
            data.examples,
            data.validation,
            adapter=adapter,
            checkpoint=start.checkpoint,
            tenant=start.tenant,
            model=start.model,
            shard=start.shard,
            others=self.jobs,
        )
        job.alone_until_step = start.alone_until_step
        self.jobs.add(job)
