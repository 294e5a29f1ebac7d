"""A device of several ranks that are threads here: each gets the same commands and steps, and rank
0 answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from coserve.devices.messages.commands import BESIDE_STEPS_OF_RANKS, Command, DeviceInfo, Reply
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.ranks.rank_device import RankDevice
from coserve.devices.torch.device import TorchDevice
from coserve.engine.token_engine import TokenEngine
from coserve.errors import RankError
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import thread_groups

T = TypeVar("T")
TIMEOUT_S = 60.0


class LockstepDevice:
    """See `coserve.devices.base.Device`, and `coserve.devices.ranks.group_device`, whose ranks are
    processes."""

    def __init__(self, make_device: Callable[[RankGroup], TorchDevice], size: int) -> None:
        self.groups = thread_groups(size, TIMEOUT_S)
        self._lock = Lock()
        self._threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(size)]
        self.ranks = self._on_all(lambda rank: make_device(self.groups[rank]))
        self._rank_devices = [
            RankDevice(*each) for each in zip(self.ranks, self.groups, strict=True)
        ]
        self.clock = self.ranks[0].clock
        self.results: list[StepResult] = []
        """What each rank says of the last step, in rank order."""
        self.errors: list[BaseException] = []
        """What each rank that failed raised in the last step or command that failed."""
        self._step: Sequence[Future[StepResult]] | None = None

    @property
    def info(self) -> DeviceInfo:
        return self.ranks[0].info

    def execute(self, command: Command) -> Reply:
        return self._on_all(lambda rank: self._execute(rank, command))[0]

    def submit(self, batch: StepBatch) -> None:
        self._step = self._begin(lambda rank: self._rank_devices[rank].run(batch))

    def collect(self) -> StepResult:
        step, self._step = self._step, None
        assert step is not None
        self.results = self._results(step)
        return self.results[0]

    def close(self) -> None:
        self._on_all(lambda rank: self.ranks[rank].close())
        for thread in self._threads:
            thread.shutdown()

    def _execute(self, rank: int, command: Command) -> Reply:
        device = self._rank_devices[rank]
        if isinstance(command, BESIDE_STEPS_OF_RANKS):
            return device.execute_beside(command)
        return device.execute(command)

    def _begin(self, run: Callable[[int], T]) -> list[Future[T]]:
        with self._lock:  # all ranks in the same order, whichever thread calls
            return [thread.submit(run, rank) for rank, thread in enumerate(self._threads)]

    def _on_all(self, run: Callable[[int], T]) -> list[T]:
        return self._results(self._begin(run))

    def _results(self, futures: Sequence[Future[T]]) -> list[T]:
        """Return what all ranks give; raise, of their errors, one of a rank that did not merely
        stop with others."""
        errors = [error for future in futures if (error := future.exception(TIMEOUT_S)) is not None]
        if errors:
            self.errors = errors
            raise min(errors, key=lambda each: isinstance(each, RankError))
        return [future.result() for future in futures]


def lockstep(engine: TokenEngine) -> LockstepDevice:
    """Return the ranks of an engine that `make_engine` made with several."""
    device = getattr(engine.device, "inner", None)
    assert isinstance(device, LockstepDevice)
    return device
