"""Ends of a device of several ranks: all together, whichever of them dies, stands still or cannot
start.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random

import pytest
import rank_devices
from devices import Driver
from engines import adapter_directory, greedy
from lengths import NUM_RANK_KILLS
from rank_devices import (
    PROMPT,
    are_gone,
    begin,
    failing_group,
    generates_as_one_process,
    group_says_why_it_cannot_start,
)

from coserve.devices.messages.commands import (
    CloseRequest,
    CountCommands,
    DescribeRanks,
    DropVersion,
    OpenVersion,
)
from coserve.devices.messages.steps import StepBatch
from coserve.devices.process.child import DeviceProcess
from coserve.devices.ranks.group_device import GroupDevice
from coserve.errors import BudgetError, DeviceGoneError


def test_a_group_that_cannot_start_says_why(tmp_path):
    assert group_says_why_it_cannot_start(tmp_path)


def test_ranks_that_are_programs_say_why_they_cannot_start():
    """An engine without a server has such ranks."""
    with pytest.raises(
        BudgetError, match=r"^the page pool needs [0-9]+ bytes or more, for two pages$"
    ):
        GroupDevice(rank_devices.settings(2, memory_bytes=1))


@pytest.mark.long
def test_a_rank_that_dies_at_the_start_ends_that_of_all(tmp_path):
    with pytest.raises(
        DeviceGoneError, match=r"^rank 1 \(process \d+\) has ended before it was ready$"
    ):
        failing_group(tmp_path, 2, before="if RANK == 1: sys.exit(3)")


@pytest.mark.parametrize(("killed", "is_in_step"), [(1, False), (0, True)])
def test_ranks_end_together_and_nobody_waits_for_them(tmp_path, killed, is_in_step):
    device = failing_group(tmp_path, 2)
    driver, pids = Driver(device), device.pids
    if is_in_step:
        begin(driver, "sleeps-on-1")
        wait_for(tmp_path / "asleep")
    else:
        assert generates_as_one_process(driver)
        device.submit(StepBatch(step=1))
        device.collect()
    os.kill(pids[killed], signal.SIGKILL)
    for _ in range(2):
        if not is_in_step:
            device.submit(StepBatch(step=2))
        is_in_step = False
        with pytest.raises(DeviceGoneError, match=r"rank \d .*has ended"):
            device.collect()
        with pytest.raises(DeviceGoneError, match=r"rank \d .*has ended"):
            driver.open("s", greedy(1))
    assert are_gone(pids), "an orphan, before the device is closed"
    device.close()
    device.close()


@pytest.mark.parametrize(
    ("command", "did_not"),
    [(CountCommands(), "come within 1 s"), (DescribeRanks(), "answer within 1 s of another")],
)
def test_a_rank_that_stands_still_ends_the_group(tmp_path, command, did_not):
    """It does so even where no other rank waits for it, as in what is done beside steps."""
    device = failing_group(tmp_path, 2, rank_timeout_s=1.0)
    assert generates_as_one_process(Driver(device))
    os.kill(device.pids[1], signal.SIGSTOP)
    with pytest.raises(DeviceGoneError, match=rf"rank 1 \(process \d+\) did not {did_not}"):
        device.execute(command)
    assert are_gone(device.pids)
    device.close()


@pytest.mark.long
def test_calls_in_other_threads_end_with_the_group(tmp_path):
    device = failing_group(tmp_path, 2)
    begin(Driver(device), "sleeps-on-1")
    wait_for(tmp_path / "asleep")
    with ThreadPoolExecutor() as pool:
        opened = pool.submit(device.execute, OpenVersion("v", adapter_directory()))
        counted = pool.submit(device.execute, CountCommands())
        device.close()
        for each in (opened, counted):
            with pytest.raises(DeviceGoneError, match="is closed"):
                each.result(60)
    with pytest.raises(DeviceGoneError, match="is closed"):
        device.collect()


@pytest.mark.long
def test_a_call_that_is_interrupted_between_two_ranks_ends_the_group(tmp_path, monkeypatch):
    """One rank has it, and the other never will."""
    device = failing_group(tmp_path, 2)
    real = DeviceProcess.call

    def call(self, *given):
        if self.pid == device.pids[1]:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(DeviceProcess, "call", call)
    with pytest.raises(KeyboardInterrupt):
        device.execute(CountCommands())
    with pytest.raises(DeviceGoneError, match="a call was interrupted"):
        device.execute(CountCommands())
    assert are_gone(device.pids)
    device.close()


@pytest.mark.long
def test_ranks_end_with_the_process_that_started_them():
    """Even if that is killed, in the middle of a step."""
    code = (
        "import time; from coserve.devices.ranks.group_device import GroupDevice; from rank_devices "
        "import settings\n"
        "device = GroupDevice(settings(2)); print(*device.pids, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join([str(Path(rank_devices.__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = tuple(map(int, parent.stdout.readline().split()))
        parent.kill()
        parent.wait()
    assert len(pids) == 2 and are_gone(pids)


@pytest.mark.long
def test_no_rank_outlives_another_one_whenever_that_is_killed(tmp_path):
    """Again and again: at a random moment of requests, commands and steps, a random rank."""
    random = Random(7)
    for number in range(NUM_RANK_KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        device = failing_group(directory, 2)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(work_until_gone, device)
            time.sleep(random.uniform(0.0, 0.5))
            os.kill(random.choice(device.pids), signal.SIGKILL)
            ended.result(60)
        assert are_gone(device.pids), f"an orphan of kill {number}"
        device.close()


def work_until_gone(device: GroupDevice) -> None:
    """Have a device do all kinds of things until it has gone."""
    try:
        for number in count():
            driver = Driver(device)  # which gives out pages from the bottom again
            device.execute(OpenVersion("v", adapter_directory()))
            driver.generate(f"plain {number}", PROMPT, greedy(3), chunk=5)
            driver.generate(f"with {number}", PROMPT, greedy(3), version="v")
            closed = [
                CloseRequest(f"plain {number}"),
                CloseRequest(f"with {number}"),
                DropVersion("v"),
            ]
            driver.step(commands=closed)
    except DeviceGoneError:
        return
    raise AssertionError("it works for ever")


def wait_for(path: Path) -> None:
    """Wait until a rank has written a file."""
    start_s = time.monotonic()
    while not path.exists():
        assert time.monotonic() - start_s < 120
        time.sleep(0.001)
