"""The device on PyTorch, for CPUs and GPUs by one code path.

A step is launched section by section and waited for once: everything that it computes for the
engine (tokens, log-probabilities, loss sums, gradient norms) is read together at its end, and
sections are timed by the device's own events. A step can be divided (`Partition`,
`coserve.devices.sides.base`), but not where results must be the same bit for bit: such a device has
one unit.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch

from coserve.adapters.base import Adapter
from coserve.adapters.full_model import serve_full_model
from coserve.adapters.held_parameters import held_elements
from coserve.adapters.peft_directory import load_adapter, read_config, save_adapter
from coserve.devices.base import Clock, CommandCount, WallClock
from coserve.devices.counting import device_info
from coserve.devices.messages.commands import (
    BESIDE_STEPS,
    CloseGrammar,
    CloseRequest,
    Command,
    CountCommands,
    DescribeRanks,
    DeviceMeasured,
    DropVersion,
    ExportPages,
    GrammarOpened,
    ImportPages,
    MeasureDevice,
    OpenGrammar,
    OpenRequest,
    OpenVersion,
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
    ResizeWindow,
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
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.profiles.own_measurement import OwnMeasurement
from coserve.devices.ranks.inverses import inverses_of
from coserve.devices.ranks.report import describe_rank
from coserve.devices.ranks.verdicts import check_alike, fail_on_all
from coserve.devices.sides.dividing import sides_of
from coserve.devices.torch.adapter_memory import AdapterMemory
from coserve.devices.torch.copies import TorchCopy
from coserve.devices.torch.other_models import OtherModels
from coserve.devices.torch.process_memory import memory_errors
from coserve.devices.torch.requests import TorchRequests
from coserve.devices.torch.step import TorchStep
from coserve.devices.torch.trainer import TorchTrainer, open_trainer
from coserve.errors import AdapterError
from coserve.memory.tensors.host_pages import HostPages, is_away, shapes_of
from coserve.memory.tensors.page_files import PageFiles
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models.backbone import Backbone
from coserve.models.files import some_of
from coserve.scheduling.plan import Partition
from coserve.scheduling.profile import Profile


class TorchDevice:
    """Device in this process; see `coserve.devices.base.Device`."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_pages: int,
        block_tokens: int,
        profile: Profile,
        profile_path: str = "",
        num_host_pages: int = 0,
        is_provisional: bool = False,
    ) -> None:
        """Take the memory of the page pool, and of pages on the host.

        Args:
            backbone: The model.
            num_pages: Number of pages.
            block_tokens: Tokens of a page.
            profile: Measured times of the pieces of a step.
            profile_path: File that the profile comes from, or will be kept in.
            num_host_pages: Number of slots of a page's size in host memory.
            is_provisional: Whether the profile is to be measured by `MeasureDevice`.

        Raises:
            DeviceMemoryError: There is too little memory.
        """
        self.backbone, self._sides = backbone, sides_of(backbone)
        self.clock: Clock = WallClock()
        self.info = device_info(
            backbone,
            num_pages=num_pages,
            block_tokens=block_tokens,
            threads=torch.get_num_threads(),
            profile=profile,
            profile_path=profile_path,
            num_units=1 if self._sides is None else self._sides.num_units,
            num_host_pages=num_host_pages,
            is_provisional=is_provisional,
        )
        self._measurement, self._count = OwnMeasurement(backbone), CommandCount()
        with memory_errors():
            self._pages = PagedKv(backbone, num_pages=num_pages, block_tokens=block_tokens)
            self._host = HostPages(self._pages, num_slots=num_host_pages)
            # Captured calls hold addresses of the pool, whose memory has all been taken by now.
            self._pages.capture()
        self._page_files, self._others = PageFiles(self._pages), OtherModels(backbone, self._pages)
        self._adapter_memory = AdapterMemory(
            backbone.device,
            backbone.dtype,
            group=backbone.group,
            held=partial(held_elements, backbone),
        )
        self._versions, self._trainers = dict[str, Adapter](), dict[str, TorchTrainer]()
        self._requests = TorchRequests(self._pages, self._versions)
        # The job that trains the backbone's own weights, or did; now, and before the last trainer
        # was opened.
        self._changed_by = self._changed_before = ""
        self._checkpoints: dict[str, TorchCopy] = {}
        # The copy that the last `TakeContribution` made; "" if it was there before.
        self._contributed = ""
        # What takes the last command back, if that was a `CombineContributions`.
        self._take_back: Callable[[], None] | None = None
        self._placing_s = 0.0  # of moments since the last step
        self._step: TorchStep | None = None
        self._handlers: dict[type, Callable[[Any], Reply]] = {
            MeasureDevice: lambda command: self._measure(),
            CountCommands: lambda command: self._count.reply(),
            DescribeRanks: lambda command: describe_rank(backbone),
            ResizeWindow: lambda command: self._others.resize(
                command.first_page, command.num_pages
            ),
            PlaceOptimizer: self._place_optimizer,
            OpenRequest: lambda command: self._requests.open(command),
            CloseRequest: lambda command: self._requests.close(command.request),
            SwapOut: lambda command: self._host.copy_out(command.pages, command.slots),
            SwapIn: lambda command: self._host.copy_in(command.pages, command.slots),
            MovePages: self._move_pages,
            ExportPages: lambda command: self._page_files.export(
                command.path, command.pages, command.places
            ),
            ImportPages: self._import_pages,
            SwapOutTensors: self._swap_out_tensors,
            SwapInTensors: self._swap_in_tensors,
            SetVocabulary: lambda command: self._requests.grammars.use(command.vocabulary),
            OpenGrammar: lambda command: GrammarOpened(
                self._requests.grammars.open(command.grammar, command.max_states)
            ),
            CloseGrammar: lambda command: self._requests.grammars.close(command.grammar),
            OpenVersion: self._open_version,
            SaveAdapter: lambda command: save_adapter(
                self._versions[command.version], command.directory
            ),
            DropVersion: self._drop_version,
            OpenTrainer: self._open_trainer,
            CloseTrainer: self._close_trainer,
            DropTrainer: self._drop_trainer,
            BeginPack: self._begin_pack,
            MovePack: self._move_pack,
            DropPack: lambda command: self._trainers[command.job].drop_pack(),
            PublishVersion: self._publish,
            TakeCheckpoint: self._take_checkpoint,
            WriteCheckpoint: lambda command: self._checkpoints[command.checkpoint].write(
                Path(command.directory)
            ),
            DropCheckpoint: self._drop_checkpoint,
            TakeContribution: self._take_contribution,
            ReadContributions: self._read_contributions,
            CombineContributions: self._combine_contributions,
        }

    def execute(self, command: Command) -> Reply:
        # Commands beside steps may come between a combination and its undoing.
        if not isinstance(command, BESIDE_STEPS):
            self._take_back = None
        try:
            with memory_errors():
                reply = self._handlers[type(command)](command)
        except Exception:
            # A command that failed is answered, too, and counts (`CountCommands`).
            self._count.add(command)
            raise
        self._count.add(command)
        return reply

    def undo(self, command: Command) -> None:
        """Take back a command that has failed on another rank; it stays counted."""
        # Most commands have a command that undoes them; those below leave state that has none.
        for inverse in inverses_of(command):
            self._handlers[type(inverse)](inverse)
        if isinstance(command, MeasureDevice):
            self._measurement = OwnMeasurement(self.backbone)
        if isinstance(command, OpenTrainer):
            self._changed_by = self._changed_before
        if isinstance(command, CombineContributions) and self._take_back is not None:
            self._take_back()
            self._take_back = None
        if isinstance(command, TakeContribution) and self._contributed:
            self._trainers[command.job].take_back(self._checkpoints.pop(self._contributed))

    def submit(self, batch: StepBatch) -> None:
        """Launch the step; on a CPU it has run on return, but its numbers are not read."""
        # Before anything can fail, so that no result of an earlier step is left to collect.
        self._step = self._take_back = None
        try:
            step = self._prepared(batch)
        except Exception as error:
            # The other ranks are in the step by now, or will be: they must not wait for this one.
            if self.backbone.group.size > 1:
                fail_on_all(self.backbone.group, error)
            raise
        step.launch()
        self._step = step

    def collect(self) -> StepResult:
        """Wait for the step; where ranks divide the model, for all of them, which end it alike
        (`ranks.verdicts`).
        """
        step, self._step = self._step, None
        assert step is not None, "no step was submitted"
        return step.result()

    def _prepared(self, batch: StepBatch) -> TorchStep:
        """Return the step once its commands are done and its requests have their new pages."""
        check_alike(self.backbone.group, batch, "steps")
        # Commands come first: they open requests, jobs and pages that the step's rows need.
        for command in batch.commands:
            self.execute(command)
        self._requests.extend_tables(batch.requests)
        assert batch.partition is None or _num_used(batch.partition) <= self.info.num_units, (
            "it has not as many units"
        )
        # Of copies since the last step; `StepResult` reports them with this one's times.
        copy_s = self._host.take_seconds() + self._page_files.take_seconds() + self._placing_s
        self._placing_s = 0.0
        return TorchStep(
            self.backbone,
            self._requests,
            self._trainers,
            self._sides,
            self._host,
            self._others,
            batch,
            copy_s=copy_s,
        )

    def close(self) -> None:
        """End threads; memory is freed with the object."""
        if self._sides is not None:
            self._sides.close()
        self._others.close()
        self._requests.grammars.shutdown()

    # -- commands -------------------------------------------------------------------

    def _measure(self) -> DeviceMeasured:
        assert self.info.is_provisional, "its profile is measured"
        measured = self._measurement.run_piece()
        if measured.profile is not None:
            self.info = msgspec.structs.replace(
                self.info, profile=measured.profile, is_provisional=False
            )
        return measured

    def _move_pages(self, command: MovePages) -> None:
        self._host.wait()  # what lay in the targets may just be on its way to the host
        self._pages.move(command.pages, command.targets)
        self._requests.move_pages(dict(zip(command.pages, command.targets, strict=True)))

    def _import_pages(self, command: ImportPages) -> None:
        self._host.wait()  # what the pages held may just be on its way to the host
        self._page_files.take(command.path, command.pages, command.places, command.data)

    def _place_optimizer(self, command: PlaceOptimizer) -> None:
        started_s = perf_counter()
        self._host.wait()  # what the pages held may just be on its way to the host
        trainer = self._trainers.get(command.job)
        # A job may have been closed or dropped meanwhile; its moments are gone then.
        if trainer is not None and trainer.optimizer is not None:
            trainer.moments.place(self._pages, command.first_page, command.num_pages)
            # Moments in pages still need a place beside the pool for when the pages are taken back,
            # unless they then go to the host.
            self._adapter_memory.let_go(command.job)
            if command.num_pages and not trainer.moments.need_pages:
                self._adapter_memory.keep(command.job, trainer.moments.num_bytes)
        self._placing_s += perf_counter() - started_s

    def _swap_out_tensors(self, command: SwapOutTensors) -> None:
        if (trainer := self._trainers.get(command.job)) is not None:
            if trainer.optimizer is not None:
                trainer.moments.put_away(self._host, command.slots)
        # Repeated commands change nothing: what is away already is not stored again.
        elif (adapter := self._versions.get(command.version)) is not None and not is_away(
            adapter.masters
        ):
            self._host.store(list(adapter.masters.values()), command.slots)
            self._versions[command.version] = adapter.with_masters(shapes_of(adapter.masters))

    def _swap_in_tensors(self, command: SwapInTensors) -> None:
        if (trainer := self._trainers.get(command.job)) is not None:
            if trainer.optimizer is not None:
                trainer.moments.bring_back()
        elif (adapter := self._versions.get(command.version)) is not None and is_away(
            adapter.masters
        ):
            masters = self._host.load(list(adapter.masters.values()), command.slots)
            self._versions[command.version] = adapter.with_masters(
                dict(zip(adapter.masters, masters, strict=True))
            )

    def _require_own_weights(self, what: str) -> None:
        """Raise AdapterError for what belongs to the weights that were loaded, once a job has
        changed them.
        """
        if self._changed_by:
            raise AdapterError(
                f"{what}: job {self._changed_by} has changed the weights of {self.backbone.name}; "
                "start a server with the model that the adapter is of, or with the job's "
                "checkpoint"
            )

    def _open_version(self, command: OpenVersion) -> VersionOpened:
        if command.changed_by:
            return self._serve_full_model(command)
        if not command.model:
            read_config(Path(command.directory))  # what is no adapter is said first
            self._require_own_weights(command.directory)
        backbone = self._others.backbone(command.model) if command.model else self.backbone
        adapter = load_adapter(backbone, command.directory, taking=self._adapter_memory.for_serving)
        self._versions[command.version] = adapter
        return VersionOpened(
            len(adapter.sites),
            adapter.num_bytes,
            adapter.config.num_virtual_tokens,
            adapter.vocab_size,
        )

    def _serve_full_model(self, command: OpenVersion) -> VersionOpened:
        # Adapters are trained for the weights that were loaded; with others they would compute
        # wrongly.
        if others := [*self._versions, *self._trainers]:
            raise AdapterError(
                f"{command.directory} would change the weights that others were trained on: "
                f"{some_of(others)}"
            )
        self._changed_by = command.changed_by  # also where it cannot be read to its end
        adapter = serve_full_model(
            self.backbone, Path(command.directory), self._adapter_memory.for_serving
        )
        self._versions[command.version] = adapter
        return VersionOpened(0, adapter.num_bytes, 0)

    def _drop_version(self, command: DropVersion) -> None:
        self._versions.pop(command.version, None)

    def _open_trainer(self, command: OpenTrainer) -> TrainerOpened:
        backbone, window = self.backbone, None
        if command.model:
            backbone = self._others.backbone(command.model)
            window = self._others.window(command.model)
        # Each node's part of a job has an id of its own; the weights belong to the job as a whole.
        job = command.job if command.shard is None else command.shard.job
        resumes = self._changed_by == job
        # For `undo`, since opening may set it before another rank fails.
        self._changed_before = self._changed_by
        # A job that resumes finds its own changes in the weights.
        if not command.model and not resumes:
            self._require_own_weights(f"job {command.job}")
        trainer = open_trainer(
            command, backbone, self._versions, self._adapter_memory, window, restores=resumes
        )
        opened = trainer.opened()
        # Only an open trainer has the answer whether the model's own weights are trained.
        if opened.changes_model:
            others = [*self._versions, *(job for job in self._trainers if job != command.job)]
            if others and not resumes:
                raise AdapterError(
                    f"job {command.job} would change the weights that others were trained on: "
                    f"{some_of(others)}; unload adapters and end jobs first"
                )
            if command.model:
                raise AdapterError(
                    "full fine-tuning trains the model that serves, not one beside it"
                )
            self._changed_by = job
        self._trainers[command.job] = trainer
        return opened

    def _close_trainer(self, command: CloseTrainer) -> None:
        self._adapter_memory.let_go(command.job)
        self._trainers[command.job].close()

    def _drop_trainer(self, command: DropTrainer) -> None:
        self._trainers.pop(command.job, None)

    def _begin_pack(self, command: BeginPack) -> None:
        self._host.wait()  # the pages may just have been a request's
        trainer = self._trainers[command.job]
        trainer.begin(command, self._pages)
        self._give_window(trainer)

    def _give_window(self, trainer: TorchTrainer) -> None:
        if trainer.window is not None:
            self._others.give_window(trainer.adapter.backbone.name)

    def _move_pack(self, command: MovePack) -> None:
        self._host.wait()  # losses and tasklets do not
        trainer = self._trainers[command.job]
        trainer.move(command, self._pages)
        self._give_window(trainer)

    def _publish(self, command: PublishVersion) -> None:
        self._versions[command.version] = self._trainers[command.job].version()

    def _take_checkpoint(self, command: TakeCheckpoint) -> None:
        self._checkpoints[command.checkpoint] = self._trainers[command.job].checkpoint()

    def _take_contribution(self, command: TakeContribution) -> None:
        self._contributed = ""
        if command.checkpoint not in self._checkpoints:
            self._checkpoints[command.checkpoint] = self._trainers[command.job].contribution()
            self._contributed = command.checkpoint

    def _read_contributions(self, command: ReadContributions) -> None:
        trainer = self._trainers.get(command.job)
        if trainer is not None and (exchange := trainer.exchange) is not None:
            exchange.read(command.directories)

    def _combine_contributions(self, command: CombineContributions) -> None:
        take_back = self._trainers[command.job].combine(command.up_to, meets=command.meets)
        # Kept until the next command or step: it holds what the job had before.
        self._take_back = take_back if self.backbone.group.size > 1 else None

    def _drop_checkpoint(self, command: DropCheckpoint) -> None:
        self._checkpoints.pop(command.checkpoint, None)


def _num_used(partition: Partition) -> int:
    return partition.forward_units + partition.backward_units
