"""The engine without text as a library: each method is one command, which `EngineCore` handles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import (
    NO_CALL,
    AdapterRef,
    AddRequest,
    CancelJob,
    CancelRequest,
    CombineJob,
    CopyCheckpoint,
    CopyContribution,
    DeliverBlocks,
    FlushCommands,
    ForgetJob,
    HoldRequest,
    JobExamples,
    JobStart,
    LoadAdapter,
    PauseJob,
    ResumeJob,
    SaveVersion,
    StartJob,
    Step,
    StopSequence,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.core import EngineCore
from coserve.engine.jobs.checkpoint import Checkpoint, DeviceCopy
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.opening import PeftFields, fields_of
from coserve.engine.outbox import Event
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.served_adapters import AdapterLoad, AdapterVersion
from coserve.errors import AdapterError
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Combination, Shard


class TokenEngine(EngineCore):
    """An engine for token ids: requests are added, jobs and adapters are started and ended, and
    `step` runs them.
    """

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
        """Queue a request, whose chunks `step` returns. Returns its name.

        Args:
            adapter: A name (its newest version as of now) or `name@step`; None: the bare model.
            priority: Priority; lower values are served first.
            arrival_s: Time of arrival, if that was before now.
            tenant: Owner of the request.
            without_jobs: Whether no job may have a step beside it.
            batch_due_s: Time at which batch work should be done; it runs in capacity that other
                requests leave over, and has no SLO.

        Raises:
            RequestError: it could never be served.
            AdapterError: there is no such adapter.
        """
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        ref = None if adapter is None else AdapterRef(name=adapter)
        self.handle(
            AddRequest(
                id=name,
                prompt=prompt,
                params=params,
                adapter=ref,
                slo=slo,
                arrival_s=arrival_s,
                tenant=tenant,
                priority=priority,
                batch_due_s=batch_due_s,
                without_jobs=without_jobs,
            )
        )
        return name

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """Set what tokens stand for, before the first request with a grammar; see `Vocabulary`.

        Raises:
            RequestError: the device has no library for grammars.
        """
        self.handle(UseVocabulary(pieces, special))

    def cancel(self, request: str) -> bool:
        """End a request at once; its last chunks come with the next step. Returns whether it was
        there.
        """
        return bool(self.handle(CancelRequest(request)))

    def stop(self, request: str, index: int, num_tokens: int) -> bool:
        """End a sequence of which only the first `num_tokens` tokens are wanted; its last chunk,
        without tokens, comes with the next step. Returns whether it was there.
        """
        return bool(self.handle(StopSequence(request, index, num_tokens)))

    def hold(self, request: str) -> None:
        """Hold a waiting request back until `arrive`, while another instance computes its prompt
        (`coserve.handover`).
        """
        self.handle(HoldRequest(request))

    def arrive(self, request: str, blocks: ImportedBlocks | None) -> None:
        """Deliver the handed-over blocks of a held request; None means that the handover failed,
        and the prompt is computed here.

        The file must exist until the request is admitted. Nothing happens if the request has ended.
        """
        self.handle(DeliverBlocks(request, blocks))

    # -- adapters -------------------------------------------------------------------

    def load_adapter(self, name: str, directory: str, model: str = "") -> AdapterVersion:
        """Load an adapter in PEFT's format, and serve it as `name`.

        Args:
            model: Model that it belongs to, one of the config's `trainable_models`; then it can be
                trained further, not served.

        Raises:
            AdapterError: there is an adapter of that name, or the files cannot be used.
        """
        ref = AdapterRef(name=name, directory=directory)
        version: AdapterVersion = self.handle(LoadAdapter(NO_CALL, ref, model=model, stays=True))
        return version

    def ensure_adapter(self, name: str, directory: str, model: str = "") -> None:
        """Load an adapter from disk unless it is on the device; it may be evicted when others are
        used instead.

        Raises:
            AdapterError: it cannot be loaded.
            JobError: there is no such model.
        """
        self.handle(LoadAdapter(NO_CALL, AdapterRef(name=name, directory=directory), model=model))

    def finish_load(self, load: AdapterLoad) -> None:
        """Serve an adapter that `begin_load` began, and a thread has read."""
        self.handle(
            LoadAdapter(NO_CALL, AdapterRef(name=load.name, directory=load.directory)), load
        )

    def unload_adapter(self, name: str) -> None:
        """Withdraw an adapter: no new request finds it; those that use it run to their end.

        Raises:
            AdapterError: there is no adapter of that name.
        """
        if name not in self.versions:
            version = self.versions.resolve(name)
            raise AdapterError(
                f"{name!r} is a version; the adapter is withdrawn by its name, {version.name!r}"
            )
        self.handle(UnloadAdapter(NO_CALL, name))

    def save_adapter(self, label: str, directory: str | Path) -> None:
        """Write a version (`name` or `name@step`) in PEFT's format."""
        self.handle(SaveVersion(label, str(directory)))

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
            adapter: Configuration of a fresh adapter (or the fields of PEFT's adapter_config.json),
                or the label of one to train further.
            name: Name of the adapter that it publishes (default: the job's id).
            checkpoint: Directory that `Checkpoint.write` made of the same job, with the same data,
                configuration and `adapter` (which is not needed where PEFT's directory describes it
                completely, as it does LoRA).
            tenant: Owner of the job, for policies that share the device among tenants.
            alone_until_step: Optimizer step until which no engine step that works for this job
                works for another one, so that a crash can be attributed.
            model: Model that it trains, one of the config's `trainable_models`; "" for the one that
                serves. The resulting adapter cannot be served here: it is saved, and served with
                its own model.
            shard: Part of a divided job that this engine trains; the caller exchanges contributions
                with the other nodes.

        Raises:
            JobError: it could never be run, or the checkpoint is another job's; the message says
                what would be right.
            AdapterError: the adapter cannot be used.
            ModelError: the model cannot be used.
        """
        job_id = job_id if job_id is not None else f"job-{next(self._numbers)}"
        is_label = isinstance(adapter, str)
        start = JobStart(
            id=job_id,
            name=name if name is not None else job_id,
            config=config,
            adapter=None if adapter is None or is_label else fields_of(adapter),
            start=AdapterRef(name=adapter) if isinstance(adapter, str) else None,
            checkpoint=None if checkpoint is None else str(checkpoint),
            tenant=tenant,
            alone_until_step=alone_until_step,
            model=model,
            shard=shard,
        )
        self.handle(StartJob(NO_CALL, start), JobExamples(examples=examples, validation=validation))
        return job_id

    def job(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            JobError: there is no such job.
        """
        return self.jobs.find(job_id)

    def pause_job(self, job_id: str) -> None:
        """Pause a job; its pack goes to the host, or is discarded and restarted on resume."""
        self.handle(PauseJob(NO_CALL, job_id))

    def resume_job(self, job_id: str) -> None:
        """Resume a paused job."""
        self.handle(ResumeJob(NO_CALL, job_id))

    def cancel_job(self, job_id: str) -> None:
        """End a job at once; versions that it has published stay."""
        self.handle(CancelJob(NO_CALL, job_id))

    def checkpoint(self, job_id: str) -> Checkpoint:
        """Return a copy of a job after its last whole optimizer step.

        It has no optimizer state if the job is over.
        """
        checkpoint: Checkpoint = self.handle(CopyCheckpoint(job_id))
        return checkpoint

    def contribution(self, job_id: str) -> DeviceCopy:
        """Return a copy of what this node contributes to a divided job, when its event reports that
        a contribution is due.
        """
        copy: DeviceCopy = self.handle(CopyContribution(job_id))
        return copy

    def combine(self, job_id: str, combination: Combination) -> None:
        """Apply the contributions of a divided job's nodes, which `ReadContributions` has read."""
        self.handle(CombineJob(NO_CALL, job_id, combination))

    def forget_job(self, job_id: str) -> None:
        """Forget a job that is over; versions that it has published stay."""
        self.handle(ForgetJob(job_id))

    # -- the loop -------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan, run and apply one step, and return its events. Without work, nothing runs."""
        self.begin_step()
        return self.finish_step()

    def begin_step(self) -> bool:
        """Plan a step, and have the device begin it. Returns whether there is a step; `finish_step`
        must follow.

        Between the two, requests may be added, cancelled and stopped; nothing else may be called,
        and nothing at all of an engine that is recorded. A GPU, and a device in another process,
        work meanwhile; a CPU in this process has done its work when this returns. No caller makes
        use of it yet: `step`, and with it the server, calls one right after the other, and what
        overlaps with steps is reading and writing files, in threads.
        """
        return bool(self.handle(Step()))

    def flush_commands(self) -> None:
        """Carry out the device's log, where no step is coming or an unrecorded command follows."""
        self.handle(FlushCommands())
