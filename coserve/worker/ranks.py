"""Ranks of an engine's group as the engine's process sees them: their states and their end.

A group that has lost a rank answers nothing more, so the engine's process ends with it, and the
server starts another. It ends as the rank did: a kill of the engine's process or of a rank from
outside is the fault of no job.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import NoReturn

from coserve.devices.base import Clock, Device
from coserve.devices.messages.commands import (
    Command,
    DescribeRanks,
    RankReport,
    RanksDescribed,
    Reply,
)
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.errors import DeviceGoneError

_log = logging.getLogger(__name__)

# Interval of reads of ranks' states; and of checks until the device notices an end as well.
_STATES_S, _POLL_S = 1.0, 0.01


def ending_with(device: Device) -> Device:
    """Return a device whose end ends this process; a device that is in this process is returned
    unchanged.
    """
    return device if device.info.num_ranks == 1 else _MortalDevice(device)


class _MortalDevice:
    """A device whose end is the end of this process, wherever it is noticed, so that no caller
    mistakes it for a refusal.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.info = device.info
        self.clock: Clock = device.clock
        pids = [state.pid for state in describe_ranks(self)]
        Thread(target=self._end_with_one_of, args=(pids,), name="end of ranks", daemon=True).start()

    def execute(self, command: Command) -> Reply:
        try:
            return self._device.execute(command)
        except DeviceGoneError as error:
            _end_as(error)

    def submit(self, batch: StepBatch) -> None:
        self._device.submit(batch)

    def collect(self) -> StepResult:
        try:
            return self._device.collect()
        except DeviceGoneError as error:
            _end_as(error)

    def close(self) -> None:
        self._device.close()

    def _end_with_one_of(self, pids: Sequence[int]) -> None:
        """Wait for the end of one of these processes, also while the device is idle."""
        ends = select.poll()
        for pid in pids:
            with suppress(ProcessLookupError):  # the device reports that it has ended
                ends.register(os.pidfd_open(pid), select.POLLIN)
        # A rank has ended: ask until the device notices that as well, and ends this process.
        ends.poll()
        while True:
            describe_ranks(self)
            time.sleep(_POLL_S)


class RankStates:
    """States of a device's ranks, read at most once a second; none of a device in one process."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: tuple[RankReport, ...] = ()
        self._found_s = float("-inf")

    def take(self) -> tuple[RankReport, ...]:
        """Return the newest states."""
        if (
            self._device.info.num_ranks > 1
            and (now_s := time.monotonic()) - self._found_s > _STATES_S
        ):
            self._found, self._found_s = describe_ranks(self._device), now_s
        return self._found


def describe_ranks(device: Device) -> tuple[RankReport, ...]:
    """Return the states of a device's ranks.

    Raises:
        DeviceGoneError: A rank has ended.
    """
    described = device.execute(DescribeRanks())
    assert isinstance(described, RanksDescribed)
    return described.ranks


def _end_as(error: DeviceGoneError) -> NoReturn:
    """End this process at once, in the way in which the rank has ended."""
    _log.error("the engine ends: %s", error)
    # Like the rank, so that a kill from outside is held against no job.
    if error.returncode == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
