"""What the engine asks of a device: to run a step. On torch or modelled, the engine does not ask which it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from coserve.adapters.base import AdapterConfig
from coserve.devices.messages import TokenLogprob
from coserve.engine.checkpoint import TrainerState
from coserve.engine.request import Request
from coserve.errors import DeviceMemoryError
from coserve.memory.activations import PooledMemory
from coserve.models.backbone import Backbone
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import Profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.cursor import Cursor
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.order import PackMembers


class Trainer(Protocol):
    """A job's tensors on the device: its adapter, the optimizer's state, the gradients of the step, and one pack.

    cursor: where the pack in memory is, None if there is none.
    """

    @property
    def counts(self) -> JobCounts: ...

    @property
    def cursor(self) -> Cursor | None: ...

    def num_pages(self, num_rows: int) -> int:
        """Pages that a pack of so many rows takes."""
        ...

    def begin(self, pack: PackMembers, *, evaluate: bool) -> None:
        """Take the memory of a pack's pass, of training or of measuring the loss alone; BudgetError and
        DeviceMemoryError take nothing.
        """
        ...

    def drop(self) -> None:
        """Give the pack's memory back, at any moment; what was computed of it is lost, and nothing else."""
        ...

    def finish(self) -> LossSums:
        """The pack is done: its gradients join those of the optimizer step. Returns its sums."""
        ...

    def publish(self, key: str) -> None:
        """Keep a copy of the adapter as it is, to be served under this key; DeviceMemoryError keeps none."""
        ...

    def state(self) -> TrainerState:
        """A copy of the adapter, and of the optimizer's state unless it is closed, for a checkpoint; DeviceMemoryError
        takes none.
        """
        ...

    def close(self) -> None:
        """Give everything back but the adapter."""
        ...


class RequestRows(NamedTuple):
    """The next rows of a request; sampled: whether they are its last, so that a token is chosen behind them."""

    request: Request
    num_rows: int
    sampled: bool


class WindowRows(NamedTuple):
    """The next forward window of a job's pack."""

    trainer: Trainer
    num_rows: int


class LossRows(NamedTuple):
    """The next rows of a job's pack through the loss."""

    trainer: Trainer
    num_rows: int


class Tasklets(NamedTuple):
    """The next tasklets of a job's pack."""

    trainer: Trainer
    num_rows: int
    num_tasklets: int


class Update(NamedTuple):
    """An optimizer step over the gradients of `num_trained` rows, of a job of `num_steps` steps."""

    trainer: Trainer
    num_trained: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A plan with the things that it names. Run in this order: losses, tasklets, updates, the forward pass."""

    losses: Sequence[LossRows] = ()
    tasklets: Sequence[Tasklets] = ()
    updates: Sequence[Update] = ()
    requests: Sequence[RequestRows] = ()
    windows: Sequence[WindowRows] = ()


class StepFailedError(DeviceMemoryError):
    """The device ran out of memory within a step. Packs that took part must be dropped; requests may run the same rows
    again.

    norms: of the updates that had been made by then, as in `StepResult`. broken_update: whether the one behind them was
    under way, so that its parameters may be half moved.
    """

    def __init__(self, message: str, *, norms: Sequence[float | None] = (), broken_update: bool = False) -> None:
        super().__init__(message)
        self.norms, self.broken_update = tuple(norms), broken_update


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """tokens: of the sampled requests, in their order. prompts: for each request of the step, its prompt's tokens that
    were scored (`Request.scored_rows`), or none at all if no request asked for it. norms: of the updates, None where
    the gradient was not finite. Seconds that each section took.
    """

    tokens: Sequence[TokenLogprob] = ()
    prompts: Sequence[Sequence[TokenLogprob]] = ()
    norms: Sequence[float | None] = ()
    forward_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0


class Clock(Protocol):
    """Seconds since some moment."""

    def now(self) -> float: ...


class Runner(Protocol):
    """A device with a model on it."""

    @property
    def backbone(self) -> Backbone: ...

    @property
    def clock(self) -> Clock: ...

    def run(self, work: Work) -> StepResult:
        """Run a step. Cursors move on; pages of requests are written, and for the engine to count.

        Raises:
            StepFailedError: the device ran out of memory.
        """
        ...

    def trainer(
        self,
        adapter: AdapterConfig | str | Path,
        config: TuningConfig,
        *,
        mean_context_len: float,
        memory: PooledMemory,
    ) -> Trainer:
        """Make the tensors of a job.

        Args:
            adapter: a fresh one, the key of a version to go on from, or the directory of a checkpoint to go on from
            with the optimizer's state.

        Raises:
            DeviceMemoryError; AdapterError: the checkpoint is damaged.
        """
        ...

    def load_adapter(self, key: str, directory: str) -> int:
        """Put an adapter in PEFT's format on the device, to be served under a key. Returns its bypasses."""
        ...

    def save_adapter(self, key: str, directory: str) -> None:
        """Write a version in PEFT's format."""
        ...

    def drop_version(self, key: str) -> None:
        """Let go of a version that nobody reads."""
        ...

    def profile(self) -> Profile:
        """Seconds of the pieces that steps are made of."""
        ...
