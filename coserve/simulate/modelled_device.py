"""A device without tensors: it answers commands and steps, and reports times by a virtual clock.

Tokens are a pure function of the request's seed and the place; losses are nan. The costs of a job,
and the groups of tensors that its packs take, are counted from the same graphs as on a real device.
"""

from collections.abc import Callable, Iterable
from math import nan
from pathlib import Path
from typing import Any

from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.peft_directory import adapter_config, read_config
from coserve.devices.base import CommandCount
from coserve.devices.counting import device_info, trainer_opened
from coserve.devices.grammars.device_grammars import DeviceGrammars
from coserve.devices.grammars.matching import Matcher
from coserve.devices.messages.commands import (
    CloseGrammar,
    CloseRequest,
    Command,
    CountCommands,
    DescribeRanks,
    DropVersion,
    ExportPages,
    GrammarOpened,
    ImportPages,
    OpenGrammar,
    OpenRequest,
    OpenVersion,
    RanksDescribed,
    Reply,
    SaveAdapter,
    SetVocabulary,
    VersionOpened,
)
from coserve.devices.messages.jobs import (
    BeginPack,
    CloseTrainer,
    CombineContributions,
    DropCheckpoint,
    DropPack,
    DropTrainer,
    OpenTrainer,
    PlaceOptimizer,
    PublishVersion,
    ReadContributions,
    TakeCheckpoint,
    TakeContribution,
    TrainerOpened,
    WriteCheckpoint,
)
from coserve.devices.messages.pages import (
    MovePack,
    MovePages,
    SwapIn,
    SwapInTensors,
    SwapOut,
    SwapOutTensors,
)
from coserve.devices.messages.steps import (
    PackSums,
    RequestRows,
    StepBatch,
    StepFailure,
    StepResult,
    TokenLogprob,
)
from coserve.errors import AdapterError, JobError
from coserve.models.backbone import Backbone
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import RequestInfo, RequestProgress
from coserve.scheduling.profile import Profile
from coserve.simulate.modelled_trainer import ModelledTrainer
from coserve.simulate.step_timer import ModelledStepTimer
from coserve.simulate.virtual_clock import VirtualClock
from coserve.tuning.programs import evaluation_programs, training_programs


class ModelledDevice:
    """A modelled `coserve.devices.base.Device`.

    If `fail_next` is set, the next step fails with it, and takes no time; optimizer steps before
    `broken_update` are made.
    """

    def __init__(
        self,
        backbone: Backbone,
        profile: Profile,
        *,
        num_pages: int,
        block_tokens: int = 16,
        num_host_pages: int = 0,
        noise: float = 0.0,
        seed: int = 0,
        latency: LatencyModel | None = None,
        link_flops_per_byte: float = 0.0,
    ) -> None:
        """Begin without requests and jobs.

        Args:
            backbone: Model on the "meta" device; only shapes are used.
            profile: Profile of the hardware.
            noise: Standard deviation of the logarithm of a section's time relative to the
                profile's.
            latency: Latency model, where that is more accurate than the profile.
            link_flops_per_byte: FLOPs that a rank computes while a gather moves a byte, by which
                jobs choose what ranks save in pieces (`training_programs`).
        """
        self.info = device_info(
            backbone,
            num_pages=num_pages,
            block_tokens=block_tokens,
            threads=1,
            profile=profile,
            num_units=1 if profile.sharing is None else profile.sharing.num_units,
            num_host_pages=num_host_pages,
        )
        self.clock = VirtualClock()
        self.fail_next: StepFailure | None = None
        self._backbone, self._latency = backbone, latency or LatencyModel(profile)
        self._link_flops_per_byte = link_flops_per_byte
        self._requests: dict[str, OpenRequest] = {}
        self._infos: dict[str, RequestInfo] = {}  # of the same
        self._grammars, self._matchers = DeviceGrammars(), dict[str, Matcher]()
        self._versions: dict[str, AdapterConfig] = {}
        self._num_bypasses: dict[str, int] = {}
        self._trainers: dict[str, ModelledTrainer] = {}
        self._timer = ModelledStepTimer(
            self._latency, self._trainers, self._progress_of, noise=noise, seed=seed
        )
        self._copy_s = 0.0  # of copies that no step has waited for yet
        self._overhead_s = 0.0  # of the step under way
        self._result: StepResult | None = None
        self._count = CommandCount()
        self._handlers: dict[type, Callable[[Any], Reply]] = {
            CountCommands: lambda command: self._count.reply(),
            DescribeRanks: lambda command: RanksDescribed(()),
            PlaceOptimizer: self._place_optimizer,
            OpenRequest: self._open_request,
            CloseRequest: self._close_request,
            SwapOut: self._copy,
            SwapIn: self._copy,
            MovePages: self._move_pages,
            ExportPages: self._copy,
            ImportPages: self._copy,
            SwapOutTensors: self._copy_tensors,
            SwapInTensors: self._copy_tensors,
            SetVocabulary: lambda command: self._grammars.use(command.vocabulary),
            OpenGrammar: lambda command: GrammarOpened(
                self._grammars.open(command.grammar, command.max_states)
            ),
            CloseGrammar: lambda command: self._grammars.close(command.grammar),
            OpenVersion: self._open_version,
            DropVersion: self._drop_version,
            OpenTrainer: self._open_trainer,
            CloseTrainer: lambda command: self._trainers[command.job].drop(),
            DropTrainer: self._drop_trainer,
            BeginPack: lambda command: self._trainers[command.job].begin(command),
            # Commands about tensors alone have no effect here.
            MovePack: lambda command: None,
            DropPack: lambda command: self._trainers[command.job].drop(),
            PublishVersion: self._publish,
            TakeCheckpoint: lambda command: None,
            TakeContribution: lambda command: None,
            ReadContributions: lambda command: None,
            CombineContributions: lambda command: None,
            DropCheckpoint: lambda command: None,
            SaveAdapter: self._refuse_to_save,
            WriteCheckpoint: self._refuse_to_save,
        }

    def execute(self, command: Command) -> Reply:
        try:
            reply = self._handlers[type(command)](command)
        except Exception:
            self._count.add(command)
            raise
        # After the command, so that CountCommands does not count itself.
        self._count.add(command)
        return reply

    def submit(self, batch: StepBatch) -> None:
        self._result, begins = None, False
        for command in batch.commands:
            self.execute(command)
            begins |= isinstance(command, BeginPack)
        failure, self.fail_next = self.fail_next, None
        self._overhead_s = self._latency.overhead.seconds(begins=begins) if failure is None else 0.0
        self._result = self._run(batch) if failure is None else _failed(batch, failure)

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "no step was submitted"
        self.clock.advance(result.seconds + self._overhead_s)
        return result

    def close(self) -> None:
        """Stop the thread of its masks; it has nothing else."""
        self._grammars.shutdown()

    # -- commands -------------------------------------------------------------------

    def _open_request(self, command: OpenRequest) -> None:
        self._requests[command.request] = command
        self._infos[command.request] = RequestInfo(
            # Times are no part of the command, and the latency model does not read them.
            arrival_s=0.0,
            ttft_s=nan,
            tpot_s=nan,
            version=command.version,
            num_bypasses=self._num_bypasses.get(command.version, 0),
            draws=command.params.temperature > 0,
            is_masked=command.params.grammar is not None,
        )
        if command.params.grammar is not None:
            self._matchers[command.request] = self._grammars.matcher(
                command.params.grammar, command.output
            )

    def _close_request(self, command: CloseRequest) -> None:
        self._requests.pop(command.request, None)
        self._infos.pop(command.request, None)
        self._matchers.pop(command.request, None)

    def _copy(self, command: SwapOut | SwapIn | ExportPages | ImportPages) -> None:
        self._count_copy(len(command.pages))

    def _move_pages(self, command: MovePages) -> None:
        """Advance the clock: pages are read and written before the step, at the pace at which
        attention reads keys and values.
        """
        num_tokens = len(command.pages) * self.info.block_tokens
        self.clock.advance(self._timer.with_noise(2 * num_tokens * self.info.profile.s_per_key))

    def _place_optimizer(self, command: PlaceOptimizer) -> None:
        """Count the time of moving an optimizer's moments, at that pace, if there are any yet."""
        trainer = self._trainers.get(command.job)
        if trainer is not None and (num_pages := trainer.place(command.num_pages)):
            num_tokens = num_pages * self.info.block_tokens
            self._copy_s += self._timer.with_noise(2 * num_tokens * self.info.profile.s_per_key)

    def _copy_tensors(self, command: SwapOutTensors | SwapInTensors) -> None:
        self._count_copy(len(command.slots))

    def _count_copy(self, num_pages: int) -> None:
        self._copy_s += self._timer.with_noise(
            self._latency.copy_s(num_pages * self.info.page_bytes)
        )

    def _open_version(self, command: OpenVersion) -> VersionOpened:
        _check_model(command.model)
        config = read_config(Path(command.directory))
        adapter = Adapter(self._backbone, config, every_target=False)
        self._serve(command.version, config, len(adapter.sites))
        return VersionOpened(
            len(adapter.sites), adapter.num_bytes, adapter.config.num_virtual_tokens
        )

    def _publish(self, command: PublishVersion) -> None:
        trainer = self._trainers[command.job]
        self._serve(command.version, trainer.config, trainer.opened.counts.num_bypasses)

    def _serve(self, version: str, config: AdapterConfig, num_bypasses: int) -> None:
        self._versions[version], self._num_bypasses[version] = config, num_bypasses

    def _drop_version(self, command: DropVersion) -> None:
        self._versions.pop(command.version, None)
        self._num_bypasses.pop(command.version, None)

    def _open_trainer(self, command: OpenTrainer) -> TrainerOpened:
        _check_model(command.model)
        if command.checkpoint is not None:
            config = read_config(Path(command.checkpoint))
        elif command.version is not None:
            config = self._versions[command.version]
        else:
            config = adapter_config(command.adapter)
        adapter, length = config.create(self._backbone, seed=0), command.mean_context_len
        training = training_programs(
            adapter,
            max_recompute=command.config.max_recompute,
            mean_context_len=length,
            link_flops_per_byte=self._link_flops_per_byte,
        )
        opened = trainer_opened(
            adapter, training, evaluation_programs(adapter, mean_context_len=length)
        )
        self._trainers[command.job] = ModelledTrainer(config, opened)
        return opened

    def _drop_trainer(self, command: DropTrainer) -> None:
        self._trainers.pop(command.job, None)

    def _refuse_to_save(self, command: Command) -> None:
        raise AdapterError("a modelled adapter has no parameters to save")

    # -- steps ----------------------------------------------------------------------

    def _run(self, batch: StepBatch) -> StepResult:
        times = self._timer.run(batch)
        for update in batch.updates:
            self._trainers[update.job].has_moments = True
        tokens = {rows.request: self._token(rows) for rows in batch.requests if rows.samples}
        ended, refused = self._ended(tokens) if self._matchers else ((), {})
        copy_s, self._copy_s = self._copy_s, 0.0
        return StepResult(
            step=batch.step,
            tokens=tokens,
            ended=ended,
            refused=refused,
            prompts={rows.request: _scored(rows) for rows in batch.requests if rows.targets}
            if batch.requests
            else {},
            num_tasklets=times.num_tasklets,
            num_beside=times.num_beside,
            packs=self._finish_packs(batch),
            norms={update.job: 0.0 for update in batch.updates} if batch.updates else {},
            forward_s=times.forward_s,
            loss_s=times.loss_s,
            backward_s=times.backward_s,
            update_s=times.update_s,
            beside_s=times.beside_s,
            copy_s=copy_s,
        )

    def _ended(self, requests: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return, of requests that have their tokens, those whose grammars let nothing follow, and
        those that have failed.
        """
        matched = {
            request: self._matchers[request] for request in requests if request in self._matchers
        }
        ended = tuple([request for request, matcher in matched.items() if matcher.has_ended])
        return ended, {
            name: matcher.error for name, matcher in matched.items() if matcher.error is not None
        }

    def _progress_of(self, rows: RequestRows) -> RequestProgress:
        """Return a request's rows as the latency model reads them."""
        num_rows = len(rows.tokens)
        return RequestProgress(
            id=rows.request,
            info=self._infos[rows.request],
            # With one row more than runs, the latency model counts no sample.
            num_rows=num_rows if rows.samples else num_rows + 1,
            num_past=rows.start,
            num_output=rows.place,
            first_token_s=None,
            last_token_s=0.0,
            num_scored=len(rows.targets),
        )

    def _token(self, rows: RequestRows) -> TokenLogprob:
        token = (self._requests[rows.request].seed + rows.place) % self.info.vocab_size
        if (matcher := self._matchers.get(rows.request)) is not None:
            token = _allowed(matcher.mask(), token, self.info.vocab_size)
            matcher.accept(token)
        return TokenLogprob(token=token, logprob=0.0)

    def _finish_packs(self, batch: StepBatch) -> dict[str, PackSums]:
        sums = {}
        moved = [
            piece.job
            for pieces in (batch.losses, batch.tasklets, batch.windows)
            for piece in pieces
        ]
        for job in dict.fromkeys(moved):
            cursor = self._trainers[job].cursor
            if cursor.done:
                sums[job] = PackSums(loss=nan, num_correct=0, num_trained=cursor.num_trained)
                self._trainers[job].drop()
        return sums


def _allowed(mask: bytes, token: int, vocab_size: int) -> int:
    """Return the first token from this one on that a mask allows, around the vocabulary."""
    bits = int.from_bytes(mask, "little") & ((1 << vocab_size) - 1)
    # Bits from this token on, or all of them around the vocabulary; then the lowest.
    bits = bits >> token << token or bits
    return (bits & -bits).bit_length() - 1


def _check_model(model: str) -> None:
    if model:
        raise JobError("a modelled device trains the served model alone: give no other model")


def _scored(rows: RequestRows) -> tuple[TokenLogprob, ...]:
    return tuple([TokenLogprob(token=token, logprob=0.0) for token in rows.targets])


def _failed(batch: StepBatch, failure: StepFailure) -> StepResult:
    updated = [update.job for update in batch.updates]
    if failure.broken_update is not None:
        updated = updated[: updated.index(failure.broken_update)]
    return StepResult(step=batch.step, norms=dict.fromkeys(updated, 0.0), failure=failure)
