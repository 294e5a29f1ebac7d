"""A job's tensors on a torch device: its adapter, the optimizer's state, the gradients of the step, and one pack."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.base import Adapter, AdapterLayout
from coserve.adapters.peft_directory import adapter_config, load_adapter, save_adapter
from coserve.adapters.tensor_files import open_tensors, write_tensors
from coserve.devices.adapter_memory import AdapterMemory
from coserve.devices.counting import trainer_opened
from coserve.devices.messages import OPTIMIZER_FILE, BeginPack, OpenTrainer, TrainerOpened
from coserve.devices.swap_messages import MovePack
from coserve.errors import AdapterError
from coserve.memory.activations import LentRuns
from coserve.memory.host_pages import HostPages, shapes_of
from coserve.memory.paged_kv import PagedKv
from coserve.memory.weight_window import WeightWindow
from coserve.models.backbone import Backbone
from coserve.tuning.blockwise import BlockwisePass
from coserve.tuning.config import TuningConfig
from coserve.tuning.layerwise import LayerwisePass
from coserve.tuning.optimizer import AdapterOptimizer
from coserve.tuning.pack import make_pack
from coserve.tuning.programs import evaluation_programs, training_programs
from coserve.tuning.training_pass import TrainingPass


class TorchTrainer:
    """See `OpenTrainer` and the commands that follow it. `training_pass`: the pack in memory, None if there is none."""

    def __init__(
        self, adapter: Adapter, config: TuningConfig, *, mean_context_len: float, window: WeightWindow | None = None
    ) -> None:
        """window: that the weights of the adapter's backbone pass through; None: they are all there."""
        self.adapter, self.window = adapter, window
        self.training_pass: TrainingPass | None = None
        self.optimizer: AdapterOptimizer | None = AdapterOptimizer(adapter.masters, config.optimizer)
        self._programs = training_programs(
            adapter, max_recompute=config.max_recompute, mean_context_len=mean_context_len
        )
        self._evaluation = evaluation_programs(adapter, mean_context_len=mean_context_len)
        self._seed = config.seed
        self._gradients: dict[str, Tensor] | None = None  # of the optimizer step
        self._last: dict[str, Tensor] | None = None  # of the last pack that is done, which may still be dropped
        self._moments_away: tuple[HostPages, tuple[int, ...]] | None = None  # where the optimizer's moments lie

    def opened(self) -> TrainerOpened:
        return trainer_opened(self.adapter, self._programs, self._evaluation, self.window)

    def begin(self, command: BeginPack, pages: PagedKv) -> None:
        self._join_last()
        if self.training_pass is not None:
            self.training_pass.release()
            self.training_pass = None
        make_pass: Callable[..., TrainingPass] = TrainingPass
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
        )

    def move(self, command: MovePack, pages: PagedKv) -> None:
        assert self.training_pass is not None, f"job {command.job} has no pack"
        self.training_pass.move(LentRuns(pages, command.runs))

    def drop_pack(self) -> None:
        self._last = None
        if self.training_pass is not None:
            self.training_pass.release()
            self.training_pass = None

    def finish_pack(self) -> None:
        """The pack is done. Its gradients count from the next pack or the optimizer step on."""
        done, self.training_pass = self.training_pass, None
        assert done is not None and done.done
        if done.programs is self._programs:
            self._last = done.gradients

    @torch.inference_mode()
    def _join_last(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        if self._gradients is None:
            self._gradients = last
            return
        torch._foreach_add_([self._gradients[name] for name in last], list(last.values()))

    def update(self, num_trained: int, num_steps: int) -> Tensor:
        """The optimizer step over the gradients of all packs since the last; returns their norm."""
        self._join_last()
        gradients, self._gradients = self._gradients, None
        assert gradients is not None and self.optimizer is not None and self._moments_away is None
        norm = self.optimizer.step(gradients, num_trained=num_trained, num_steps=num_steps)
        self.adapter.sync_compute_copy()
        return norm

    def put_away_moments(self, host: HostPages, slots: tuple[int, ...]) -> None:
        """See `SwapOutTensors`."""
        if self.optimizer is None or self._moments_away is not None:
            return
        moments = self.optimizer.moments
        host.store(list(moments.values()), slots)
        self._moments_away = host, slots  # first: it says what is true, wherever the caller is interrupted
        self.optimizer.replace_moments(shapes_of(moments))

    def bring_back_moments(self) -> None:
        """The inverse."""
        if self.optimizer is not None and self._moments_away is not None:
            self.optimizer.replace_moments(self._away_moments(on_device=True))
            self._moments_away = None

    def _away_moments(self, *, on_device: bool) -> dict[str, Tensor]:
        """Copies of what lies on the host."""
        if self.optimizer is None or self._moments_away is None:
            return {}
        (host, slots), moments = self._moments_away, self.optimizer.moments
        return dict(zip(moments, host.load(list(moments.values()), slots, on_device=on_device), strict=True))

    def checkpoint(self) -> "TorchCheckpoint":
        if self.optimizer is None:
            return TorchCheckpoint(self.adapter.snapshot(), None)
        state = self.optimizer.state() | self._away_moments(on_device=False)
        return TorchCheckpoint(self.adapter.snapshot(), state)

    def close(self) -> None:
        self.drop_pack()
        self._gradients = self.optimizer = self._moments_away = None


class TorchCheckpoint:
    """A copy of a job's tensors, which later training does not touch; may be written from any thread, beside steps."""

    def __init__(self, adapter: Adapter, optimizer: dict[str, Tensor] | None) -> None:
        self._adapter, self._optimizer = adapter, optimizer
        self._taken: torch.cuda.Event | None = None
        if adapter.backbone.device.type == "cuda":
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._taken.record(torch.cuda.current_stream(adapter.backbone.device))

    def write(self, directory: Path) -> None:
        """AdapterError or OSError if it cannot be written."""
        if self._taken is None:
            stream = None
        else:  # of its own, so that it does not wait for steps
            stream = torch.cuda.Stream(self._adapter.backbone.device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._taken)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            save_adapter(self._adapter, directory)
            if self._optimizer is not None:
                write_tensors(directory / OPTIMIZER_FILE, self._optimizer)


def open_trainer(
    command: OpenTrainer,
    backbone: Backbone,
    versions: dict[str, Adapter],
    memory: AdapterMemory,
    window: WeightWindow | None = None,
) -> TorchTrainer:
    """The tensors of a job, as the command says; AdapterError as there. window: see `TorchTrainer`."""
    checkpoint = None if command.checkpoint is None else Path(command.checkpoint)
    if checkpoint is not None:
        adapter = load_adapter(backbone, checkpoint, taking=memory.for_training)
    else:
        version = None if command.version is None else versions[command.version]
        config = adapter_config(command.adapter) if version is None else version.config
        layout = AdapterLayout.of(config, backbone.architecture, every_target=version is None)
        with memory.for_training(f"job {command.job}", layout):
            adapter = Adapter(backbone, config, seed=command.config.seed) if version is None else version.snapshot()
    trainer = TorchTrainer(adapter, command.config, mean_context_len=command.mean_context_len, window=window)
    if checkpoint is not None:
        assert trainer.optimizer is not None
        try:
            trainer.optimizer.load_state(_read_state(checkpoint / OPTIMIZER_FILE, adapter))
        except (KeyError, ValueError, OverflowError) as error:
            raise AdapterError(f"{checkpoint / OPTIMIZER_FILE} is not this adapter's: {error}") from None
    return trainer


def _read_state(path: Path, adapter: Adapter) -> dict[str, Tensor]:
    """The optimizer's, read only if its shapes are the adapter's (or those of single numbers)."""
    with open_tensors(path) as file:
        for key, header in file.headers.items():
            master = adapter.masters.get(key.rpartition("/")[0])
            if header.shape and (master is None or header.shape != tuple(master.shape)):
                needed = "is of no parameter" if master is None else f"must have the shape {list(master.shape)}"
                raise AdapterError(f"{path} is not this adapter's: {key}, of shape {list(header.shape)}, {needed}")
        return {key: file.read(key) for key in file.headers}
