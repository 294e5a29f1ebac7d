"""Tensors of a job on a torch device: its adapter, the optimizer's state, the gradients of the
step, and one pack.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.full_weights import FullWeights
from coserve.adapters.held_tensors import HeldTensors
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.peft_directory import adapter_config, load_adapter
from coserve.adapters.reparametrization import Reparametrization
from coserve.devices.counting import trainer_opened
from coserve.devices.messages.jobs import OPTIMIZER_FILE, BeginPack, OpenTrainer, TrainerOpened
from coserve.devices.messages.pages import MovePack
from coserve.devices.torch.adapter_memory import AdapterMemory
from coserve.devices.torch.copies import TorchCheckpoint, TorchCopy, read_state
from coserve.devices.torch.exchange import TorchExchange
from coserve.devices.torch.optimizer_memory import OptimizerMemory
from coserve.errors import AdapterError
from coserve.graph.layouts import AnyState
from coserve.memory.tensors.activations import LentRuns
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models.backbone import Backbone
from coserve.tuning.blockwise import BlockwisePass
from coserve.tuning.captured import CapturedWindows
from coserve.tuning.config import TuningConfig
from coserve.tuning.layerwise import LayerwisePass
from coserve.tuning.objectives import check_trains
from coserve.tuning.optimizer import NUM_MOMENTS, AdapterOptimizer
from coserve.tuning.pack import make_pack
from coserve.tuning.programs import evaluation_programs, training_programs
from coserve.tuning.rank_gradients import RankGradients
from coserve.tuning.scores import Extras, PackScores
from coserve.tuning.shard import Shard
from coserve.tuning.sums import zeros_like_all
from coserve.tuning.training_pass import TrainingPass


class TorchTrainer:
    """A job on a torch device; see `OpenTrainer` and the commands that follow it."""

    def __init__(
        self,
        adapter: Adapter,
        config: TuningConfig,
        *,
        mean_context_len: float,
        window: WeightWindow | None = None,
        reparametrization: Reparametrization | None = None,
        shard: Shard | None = None,
        moments_need_pages: bool = False,
    ) -> None:
        """Prepare the training of an adapter.

        Args:
            adapter: The adapter.
            config: Settings of the training.
            mean_context_len: Mean number of tokens that a row attends to.
            window: Window that the weights of the adapter's backbone pass through; None: they are
                all there.
            reparametrization: What is trained in place of the adapter's parameters.
            shard: This node's part of a job on several nodes.
            moments_need_pages: See `TrainerOpened`.
        """
        self.adapter, self.window, self._reparametrization = adapter, window, reparametrization
        self.training_pass: TrainingPass | None = None
        """The pack in memory."""
        trained = adapter.masters if reparametrization is None else reparametrization.parameters
        group, graphs = adapter.backbone.group, adapter.graphs
        self.states: Mapping[str, AnyState] = dict(graphs.states)
        """How ranks divide what is trained, by name; what is left out is whole."""
        if reparametrization is not None:
            self.states = {
                name: reparametrization.state_of(name, graphs.states) for name in trained
            }
        self._rank_gradients = RankGradients(group, graphs.states, graphs.summed)
        # No sums here: by the time of the norm, gradients are complete (`_complete`).
        norm_of = RankGradients(group, self.states, ()).norm
        self.optimizer: AdapterOptimizer | None = AdapterOptimizer(
            trained, config.optimizer, norm_of
        )
        self.moments = OptimizerMemory(
            self.optimizer, adapter.backbone.device, need_pages=moments_need_pages
        )
        self._moments_need_pages = moments_need_pages
        self.exchange: TorchExchange | None = None
        if shard is not None:
            # Gradients are of the adapter's parameters.
            tensors, states = (
                (adapter.masters, adapter.graphs.states)
                if shard.gives_gradients
                else (trained, self.states)
            )
            self.exchange = TorchExchange(shard, tensors, self._held(states))
        self._programs = training_programs(
            adapter,
            max_recompute=config.max_recompute,
            mean_context_len=mean_context_len,
            link_flops_per_byte=adapter.backbone.link_flops_per_byte,
        )
        # Weights that pass through a window have no fixed addresses that a captured call could
        # read.
        self._captured = None if window is not None else CapturedWindows.of(adapter)
        self._evaluation = evaluation_programs(adapter, mean_context_len=mean_context_len)
        self._objective = config.make_objective()
        if self._objective is not None:
            check_trains(
                config.objective, adapter.config, trains_head=bool(adapter.parameters("head"))
            )
            if window is not None:
                what = f"{config.objective} trains on the model that serves"
                raise AdapterError(f"{what}; jobs on other models have the method supervised")
        # Log-probabilities of the next pack's rows without the adapter.
        self._reference: Tensor | None = None
        self._seed = config.seed
        # Gradients of the optimizer step, and whether ranks have added up theirs.
        self._gradients: dict[str, Tensor] | None = None
        self._is_complete = False
        # Gradients of the last pack that is done, which may still be dropped.
        self._last: dict[str, Tensor] | None = None

    def opened(self) -> TrainerOpened:
        opened = trainer_opened(self.adapter, self._programs, self._evaluation, self.window)
        opened = msgspec.structs.replace(opened, moments_need_pages=self._moments_need_pages)
        if self._reparametrization is None:
            return opened
        trained_bytes = sum(tensor.nbytes for tensor in self._reparametrization.parameters.values())
        return msgspec.structs.replace(opened, optimizer_bytes=NUM_MOMENTS * trained_bytes)

    def begin(self, command: BeginPack, pages: PagedKv) -> None:
        # A new pack begins, so the pack before it can no longer be dropped: its gradients count.
        self._join_last()
        if self.training_pass is not None:
            self.training_pass.release()
            self.training_pass = None
        make_pass: Callable[..., TrainingPass] = TrainingPass
        # Captured windows train with the adapter: an evaluation keeps nothing, a reference is bare.
        if not command.evaluate and not command.is_reference:
            make_pass = partial(TrainingPass, captured=self._captured)
        if self.window is not None:
            make_pass = partial(LayerwisePass, self.window)
        elif self.adapter.backbone.block_rows:
            make_pass = BlockwisePass
        self.training_pass = make_pass(
            self.adapter,
            self._evaluation if command.evaluate else self._programs,
            make_pack(command.sequences),
            dropout_seed=self._seed,
            first_row=command.first_row,
            memory=LentRuns(pages, command.runs),
            training=not command.evaluate,
            **self._scoring(command),
        )

    def _scoring(self, command: BeginPack) -> dict[str, Any]:
        """Return the settings of a pass for an objective over sequences."""
        if self._objective is None:
            return {}
        scores = PackScores(
            None if command.is_reference else self._objective,
            make_pack(command.sequences),
            self.adapter.backbone.device,
            reference=self._reference,
            extras=Extras(values=command.values, labels=command.labels),
        )
        return {"bare": command.is_reference, "scores": scores}

    def move(self, command: MovePack, pages: PagedKv) -> None:
        assert self.training_pass is not None, f"job {command.job} has no pack"
        self.training_pass.move(LentRuns(pages, command.runs))

    def drop_pack(self) -> None:
        self._last = None
        if self.training_pass is not None:
            self.training_pass.release()
            self.training_pass = None

    def finish_pack(self) -> None:
        """End the pack, which is done; its gradients count from the next pack or the optimizer step
        on.
        """
        done, self.training_pass = self.training_pass, None
        assert done is not None and done.done
        # Evaluations run other programs and leave no gradients.
        if done.programs is self._programs:
            self._last = done.gradients
        if done.is_bare and done.scores is not None:
            # For the next pack, which has the same sequences, with the adapter.
            self._reference = done.scores.logprobs

    @torch.inference_mode()
    def _join_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        if self._gradients is None:
            self._gradients = last
            return
        # In one call, on a GPU a few launches, for hundreds of parameters.
        torch._foreach_add_([self._gradients[name] for name in last], list(last.values()))

    def update(self, num_trained: int, num_steps: int) -> Tensor:
        """Make an optimizer step over the gradients of all packs since the last one, and return
        their norm.
        """
        self._join_last()
        self._complete()
        # Taken before the step, which may fail: gradients must not count twice.
        gradients, self._gradients, self._is_complete = self._gradients, None, False
        if gradients is None and self.exchange is not None:  # its part of the batch has no examples
            gradients = zeros_like_all(self.adapter.masters)
        assert gradients is not None and self.optimizer is not None and not self.moments.is_away
        if self._reparametrization is not None:
            # From the adapter's parameters to what is trained in their place.
            gradients = self._reparametrization.pull_back(gradients, num_trained=num_trained)
        self.moments.fetch()
        norm = self.optimizer.step(gradients, num_trained=num_trained, num_steps=num_steps)
        self._apply()
        return norm

    def _complete(self) -> None:
        """Add up the ranks' gradients: once for all packs of an optimizer step, on all ranks."""
        if self._gradients is not None and not self._is_complete:
            self._gradients = self._rank_gradients.complete(self._gradients)
            self._is_complete = True

    def _apply(self) -> None:
        """Update what is computed with from what was trained."""
        if self._reparametrization is None:
            self.adapter.sync_compute_copy()
        else:
            self._reparametrization.apply(self.adapter)

    def contribution(self) -> TorchCopy:
        """Carry out `TakeContribution`."""
        assert self.exchange is not None and self.optimizer is not None
        self._join_last()
        # Other nodes have ranks of their own: what is sent is the sum over this node's ranks.
        if self.exchange.gives_gradients:
            self._complete()
        moments = self.optimizer.moments | self.moments.away(on_device=False)
        tensors = self.exchange.take(self._gradients, moments)
        copy = TorchCopy(tensors, self.exchange.held, self.adapter.backbone.device)
        # Last: if there was no memory for the copy, they are there still.
        self._gradients, self._is_complete = None, False
        return copy

    def take_back(self, contribution: TorchCopy) -> None:
        """Take the gradients of a contribution back, complete as they are; progress takes none."""
        assert self.exchange is not None
        if self.exchange.gives_gradients and contribution.tensors:
            self._gradients, self._is_complete = dict(contribution.tensors), True

    def combine(self, up_to: int, *, meets: bool) -> Callable[[], None]:
        """Carry out `CombineContributions`; after an error it can be repeated.

        Returns:
            A function that takes it back, so that it can be repeated: for ranks where it was done
                and has failed on another one.
        """
        exchange = self.exchange
        assert exchange is not None and self.optimizer is not None
        # References only: nothing below changes these tensors in place.
        gradients, is_complete, position = self._gradients, self._is_complete, exchange.position

        def take_back() -> None:
            exchange.return_to(position)
            self._gradients, self._is_complete = gradients, is_complete

        # The command is a repetition: these were taken in already.
        if up_to <= exchange.num_taken:
            return take_back
        if exchange.gives_gradients:
            self._gradients, self._is_complete = exchange.sum_of(up_to), True
        else:
            exchange.advance(up_to, self.optimizer, meets=meets)
            self._apply()
        exchange.note_taken(up_to)
        return take_back

    def checkpoint(self) -> TorchCheckpoint:
        if self.optimizer is None:
            return TorchCheckpoint(self.version(for_checkpoint=True), None, self._held(self.states))
        state = (
            # On the host where the device has no room for a second copy.
            self.optimizer.state(on_host=self._moments_need_pages)
            | self.moments.away(on_device=False)
            | self.adapter.state()
        )
        if self._reparametrization is not None:
            state |= self._reparametrization.state()
        return TorchCheckpoint(self.version(for_checkpoint=True), state, self._held(self.states))

    def _held(self, states: Mapping[str, AnyState]) -> HeldTensors:
        return HeldTensors(states=states, ranks=self.adapter.backbone.ranks)

    @torch.inference_mode()
    def version(self, *, for_checkpoint: bool = False) -> Adapter:
        """Return a copy of the adapter as it is now.

        Args:
            for_checkpoint: Whether it is saved, with all that a job needs to resume; else it is
                served.
        """
        if self._reparametrization is None:
            return self.adapter.checkpoint_copy() if for_checkpoint else self.adapter.snapshot()
        published = self._reparametrization.published()
        return self.adapter.with_masters(
            {name: published[name].clone() for name in self.adapter.masters}
        )

    def load_state(self, path: Path) -> None:
        """Continue where a checkpoint was taken.

        Raises:
            AdapterError: The file is not this job's.
        """
        assert self.optimizer is not None
        replaced = self._reparametrization
        masters = self.adapter.masters if replaced is None else replaced.parameters
        try:
            state = read_state(path, masters, self._held(self.states))
            # Weights that serve may be changed next: only once each rank has read its part of them.
            self.adapter.backbone.group.barrier()
            if replaced is not None:
                state = replaced.load_state(state)
            state = self.adapter.load_state(state)
            self.optimizer.load_state(state, on_host=self._moments_need_pages)
        except (KeyError, ValueError, OverflowError) as error:
            raise AdapterError(f"{path} is not this adapter's: {error}") from None

    def close(self) -> None:
        self.drop_pack()
        if self.optimizer is not None:
            # Their run of pages, or memory, is free with the last reference.
            del self.moments
        self._gradients = self.optimizer = self.exchange = None


def open_trainer(
    command: OpenTrainer,
    backbone: Backbone,
    versions: dict[str, Adapter],
    memory: AdapterMemory,
    window: WeightWindow | None = None,
    *,
    restores: bool = False,
) -> TorchTrainer:
    """Return the trainer of a job, as the command says.

    Args:
        command: The command.
        backbone: The model that it trains.
        versions: Served adapters by id.
        memory: Checks that there is memory.
        window: See `TorchTrainer`.
        restores: Whether the job has changed the model's weights before, so that without a
            checkpoint it begins with those of its files.

    Raises:
        AdapterError: See `OpenTrainer`.
    """
    checkpoint = None if command.checkpoint is None else Path(command.checkpoint)
    config = None if command.adapter is None else adapter_config(command.adapter)
    more = 0 if command.shard is None else command.shard.num_copies
    # Four ways to begin: the model's own weights or an adapter from a checkpoint, a version that is
    # served, or a new adapter.
    if checkpoint is not None and config is not None and config.is_model:
        with memory.for_training(f"job {command.job}", config.sizes(backbone.architecture), more):
            adapter = config.create(backbone, seed=command.config.seed)
    elif checkpoint is not None:
        adapter = load_adapter(
            backbone,
            checkpoint,
            taking=lambda what, layout: memory.for_training(what, layout, more),
        )
    elif config is None:
        adapter = versions[command.version or ""]
        with memory.for_training(f"job {command.job}", _sizes(adapter), more):
            is_model = adapter.config.is_model
            adapter = (
                adapter.config.create(backbone, seed=command.config.seed)
                if is_model
                else adapter.snapshot()
            )
    else:
        with memory.for_training(f"job {command.job}", config.sizes(backbone.architecture), more):
            adapter = config.create(backbone, seed=command.config.seed)
        # Begun anew, the job must not continue from the weights that it changed before.
        if restores and isinstance(adapter, FullWeights):
            adapter.restore()
    if why_not := adapter.config.why_not_trained(adapter.architecture):
        raise AdapterError(why_not)
    if adapter.config.is_model and not command.config.live:
        raise AdapterError("full fine-tuning changes the weights that serve: set live to true")
    generator = torch.Generator().manual_seed(command.config.seed)
    replaced = None if config is None else config.reparametrization(adapter, generator)
    trainer = TorchTrainer(
        adapter,
        command.config,
        mean_context_len=command.mean_context_len,
        window=window,
        reparametrization=replaced,
        shard=command.shard,
        moments_need_pages=memory.moments_need_pages(adapter.num_parameters, more),
    )
    if checkpoint is not None:
        trainer.load_state(checkpoint / OPTIMIZER_FILE)
    # After the state is read: the adapter's parameters follow from what is trained in their place.
    if replaced is not None:
        replaced.apply(adapter)
    if trainer.exchange is not None:
        # Last: the values that all nodes begin with are those that were just read or made.
        trainer.exchange.begin()
    return trainer


def _sizes(adapter: Adapter) -> AdapterLayout:
    """Return the tensors of a version once it is trained."""
    config = adapter.config
    return config.sizes(adapter.backbone.architecture) if config.is_model else adapter.layout
