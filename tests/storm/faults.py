"""Faults between any two of an engine's actions on its device: each may hit before an action, in
its middle, or after it, where the caller does not learn that it was done. One function each;
`FAULTS` has them by name.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from msgspec.structs import replace
from storm.ledger import LedgerDevice

from coserve.devices.messages.commands import Command, OpenVersion, Reply
from coserve.devices.messages.jobs import (
    BeginPack,
    OpenTrainer,
    PublishVersion,
    TakeCheckpoint,
    WriteCheckpoint,
)
from coserve.devices.messages.pages import SwapIn, SwapInTensors
from coserve.devices.messages.steps import StepBatch, StepFailure, StepResult
from coserve.errors import AdapterError, DeviceGoneError, DeviceMemoryError

# Of the times when it is a device's turn to be gone: each costs all that was under way.
_GONE_SHARE = 0.1

Action = Command | StepBatch | None  # None: collect


class StormError(Exception):
    """What a device raises that is broken."""


class FaultyDevice:
    """A device that fails now and then. rate: the probability of a fault at an action. kinds: of
    faults.

    num_actions, hits: how many there were, and how many faults of each kind. jumped_s: by how much
    the clock has.
    """

    def __init__(self, inner: LedgerDevice, rng: Random) -> None:
        self.inner, self.info, self.clock, self.rng = inner, inner.info, inner.clock, rng
        self.rate: float = 0.0
        self.kinds: tuple[str, ...] = tuple(FAULTS)
        self.num_actions, self.jumped_s = 0, 0.0
        self.hits: Counter[str] = Counter()
        self.is_gone = False
        self.failure: StepFailure | None = None  # of the step under way
        self.error: BaseException | None = None  # that its `collect` raises

    def execute(self, command: Command) -> Reply:
        fault = self._fault(command)
        if fault is not None:
            return fault(self, command)
        return self.inner.execute(command)

    def submit(self, batch: StepBatch) -> None:
        self.failure = self.error = None
        fault = self._fault(batch)
        if fault is not None:
            fault(self, batch)
        else:
            self.inner.submit(batch)

    def collect(self) -> StepResult:
        fault = self._fault(None)
        (failure, self.failure), (error, self.error) = (self.failure, None), (self.error, None)
        result = self.inner.collect()
        if fault is not None:
            fault(self, None)
        if error is not None:
            raise error
        if failure is not None:
            result = StepResult(step=result.step, norms=result.norms, failure=failure)
        return result

    def close(self) -> None:
        self.inner.close()

    def _fault(self, action: Action) -> "Fault | None":
        """What goes wrong with the next action."""
        if self.is_gone:
            raise DeviceGoneError("the storm has ended the device's process")
        self.num_actions += 1
        is_step = action is None or isinstance(action, StepBatch)
        if self.rng.random() >= (
            self.rate if is_step else 3 * self.rate
        ):  # commands are rarer than steps
            return None
        possible = [name for name in self.kinds if name not in OWN or OWN[name](action)]
        if not possible:
            return None
        own = [name for name in possible if name in OWN]
        name = self.rng.choice(own if own and self.rng.random() < 0.5 else possible)
        if name.startswith("gone") and self.rng.random() > _GONE_SHARE:
            return None
        self.hits[name] += 1
        return FAULTS[name]


Fault = Callable[[FaultyDevice, Action], Reply]


def _do(device: FaultyDevice, action: Action) -> Reply:
    """The action itself."""
    if isinstance(action, StepBatch):
        device.inner.submit(action)
        return None
    return None if action is None else device.inner.execute(action)


# -- faults -------------------------------------------------------------------------------


def out_of_memory(device: FaultyDevice, action: Action) -> Reply:
    """A command finds no memory, and has done nothing."""
    raise DeviceMemoryError("the storm has taken the memory")


def out_of_memory_within(device: FaultyDevice, action: Action) -> Reply:
    """A step runs out of memory: its pages have joined, and some of its pieces have run."""
    assert isinstance(action, StepBatch)
    part, broken = first_pieces(action, device.rng)
    device.inner.submit(part)
    device.failure = StepFailure(message="the storm has taken the memory", broken_update=broken)
    return None


def unreadable(device: FaultyDevice, action: Action) -> Reply:
    """Files cannot be read."""
    raise AdapterError("the storm has taken the files")


def disk_full(device: FaultyDevice, action: Action) -> Reply:
    """Files cannot be written."""
    raise OSError(28, "No space left on device")


def interrupted_before(device: FaultyDevice, action: Action) -> Reply:
    """Ctrl-C before anything is done; one that hits `collect` finds the step done."""
    raise KeyboardInterrupt


def interrupted_after(device: FaultyDevice, action: Action) -> Reply:
    """Ctrl-C when it has been done, but the caller does not know."""
    _do(device, action)
    raise KeyboardInterrupt


def interrupted_within(device: FaultyDevice, action: Action) -> Reply:
    """Ctrl-C where a step should begin: some commands are done, perhaps some pieces."""
    assert isinstance(action, StepBatch)
    num_done = device.rng.randint(0, len(action.commands))
    for command in action.commands[:num_done]:
        device.inner.execute(command)
    if num_done == len(action.commands):
        device.inner.submit(replace(first_pieces(action, device.rng)[0], commands=()))
    raise KeyboardInterrupt


def broken(device: FaultyDevice, action: Action) -> Reply:
    """A step raises an error that nobody knows, after some of its pieces."""
    assert isinstance(action, StepBatch)
    device.inner.submit(first_pieces(action, device.rng)[0])
    device.error = StormError("the storm has broken the device")
    return None


def gone_before(device: FaultyDevice, action: Action) -> Reply:
    """The device's process ends."""
    device.is_gone = True
    raise DeviceGoneError("the storm has ended the device's process")


def gone_after(device: FaultyDevice, action: Action) -> Reply:
    """The device's process ends when it has done it, but has not replied."""
    _do(device, action)
    return gone_before(device, action)


def slow(device: FaultyDevice, action: Action) -> Reply:
    """It takes as long as many others."""
    device.clock.advance(device.rng.lognormvariate(0.0, 2.0))
    return _do(device, action)


def clock_jump(device: FaultyDevice, action: Action) -> Reply:
    """The machine sleeps for minutes or hours."""
    jump_s = device.rng.choice((60.0, 3600.0, 86400.0))
    device.clock.advance(jump_s)
    device.jumped_s += jump_s
    return _do(device, action)


def first_pieces(batch: StepBatch, rng: Random) -> tuple[StepBatch, str | None]:
    """What runs of a step before it fails, in the order of `StepBatch`, and the job in whose update
    it does."""
    num_left = rng.randint(0, len(batch.losses) + len(batch.tasklets) + len(batch.updates) + 1)
    no_rows = tuple(
        [replace(rows, tokens=(), samples=False, targets=()) for rows in batch.requests]
    )
    part = replace(batch, losses=(), tasklets=(), updates=(), requests=no_rows, windows=())
    part = replace(part, losses=batch.losses[:num_left])
    if (num_left := num_left - len(batch.losses)) <= 0:
        return part, None
    part = replace(part, tasklets=batch.tasklets[:num_left])
    if (num_left := num_left - len(batch.tasklets)) <= 0:
        return part, None
    part = replace(part, updates=batch.updates[:num_left])
    if num_left < len(batch.updates):
        return part, batch.updates[num_left].job if rng.random() < 0.5 else None
    if num_left > len(batch.updates):
        unsampled = tuple([replace(rows, samples=False, targets=()) for rows in batch.requests])
        part = replace(part, requests=unsampled, windows=batch.windows)
    return part, None


def _takes_memory(action: Action) -> bool:
    kinds = (
        OpenVersion
        | OpenTrainer
        | BeginPack
        | PublishVersion
        | TakeCheckpoint
        | SwapIn
        | SwapInTensors
    )
    return isinstance(action, kinds)


def _reads_files(action: Action) -> bool:
    return isinstance(action, OpenVersion) or (
        isinstance(action, OpenTrainer) and action.checkpoint is not None
    )


def _is_step(action: Action) -> bool:
    return isinstance(action, StepBatch)


FAULTS: Mapping[str, Fault] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        *(
            out_of_memory,
            out_of_memory_within,
            unreadable,
            disk_full,
            interrupted_before,
            interrupted_after,
        ),
        *(interrupted_within, broken, gone_before, gone_after, slow, clock_jump),
    )
}
# Which actions a fault can hit that cannot hit all of them.
OWN: Mapping[str, Callable[[Action], bool]] = {
    "out-of-memory": _takes_memory,
    "out-of-memory-within": _is_step,
    "unreadable": _reads_files,
    "disk-full": lambda action: isinstance(action, WriteCheckpoint),
    "interrupted-within": _is_step,
    "broken": _is_step,
}
