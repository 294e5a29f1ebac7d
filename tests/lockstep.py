"""A device of several ranks that are threads here: each gets the same commands and steps, and rank 0 answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

from coserve.devices.messages import BESIDE_STEPS, Command, DeviceInfo, OpenVersion, Reply
from coserve.devices.rank_verdicts import Failure, agree_on_end
from coserve.devices.step_messages import StepBatch, StepResult
from coserve.devices.torch_device import TorchDevice
from coserve.engine.core import EngineCore
from coserve.errors import RankError
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import thread_groups

T = TypeVar("T")
TIMEOUT_S = 60.0


class LockstepDevice:
    """See `coserve.devices.base.Device`. A command that fails on one rank has to fail on all."""

    def __init__(self, make_device: Callable[[RankGroup], TorchDevice], size: int) -> None:
        self.groups = thread_groups(size, TIMEOUT_S)
        self._lock = Lock()
        self._threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(size)]
        self.ranks = self._on_all(lambda rank: make_device(self.groups[rank]))
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
        self._step = self._begin(lambda rank: self._run(self.ranks[rank], batch))

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
        device, group = self.ranks[rank], self.groups[rank]
        if isinstance(command, BESIDE_STEPS) and not isinstance(command, OpenVersion):
            return device.execute(command)
        reply, error = None, None
        try:
            reply = device.execute(command)
        except Exception as raised:
            error = raised
            if not isinstance(raised, RankError):
                group.fail(str(raised))
        failure = agree_on_end(group, None if error is None else Failure.of(error, rank))
        if failure is not None:
            assert error is not None, f"{type(command).__name__} fails on some ranks alone: {failure}"
            raise failure.error(rank, error)
        return reply

    def _run(self, device: TorchDevice, batch: StepBatch) -> StepResult:
        device.submit(batch)
        return device.collect()

    def _begin(self, run: Callable[[int], T]) -> list[Future[T]]:
        with self._lock:  # all ranks in the same order, whichever thread calls
            return [thread.submit(run, rank) for rank, thread in enumerate(self._threads)]

    def _on_all(self, run: Callable[[int], T]) -> list[T]:
        return self._results(self._begin(run))

    def _results(self, futures: Sequence[Future[T]]) -> list[T]:
        """Return what all ranks give; raise, of their errors, one of a rank that did not merely stop with others."""
        errors = [error for future in futures if (error := future.exception(TIMEOUT_S)) is not None]
        if errors:
            self.errors = errors
            raise min(errors, key=lambda each: isinstance(each, RankError))
        return [future.result() for future in futures]


def lockstep(engine: EngineCore) -> LockstepDevice:
    """Return the ranks of an engine that `make_engine` made with several."""
    device = getattr(engine.device, "inner", None)
    assert isinstance(device, LockstepDevice)
    return device
