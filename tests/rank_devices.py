"""Devices of several ranks, whose processes can be told to fail: what fails where is in the names
of ids.

fails-on-1      a command with such an id raises DeviceMemoryError on rank 1 before it is carried
out breaks-on-1     a step with a request of such a name raises KeyError on rank 1, in its forward
pass full-on-1       likewise, but rank 1 runs out of memory sleeps-on-1     likewise, but rank 1
writes the file `asleep` and sleeps
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from devices import Driver
from engines import expected_tokens, greedy
from forked_ranks import forking
from msgspec.structs import replace
from support import make_backbone, model_directory, random_tokens

from coserve.devices.messages.commands import CloseRequest
from coserve.devices.messages.steps import RequestRows, StepBatch
from coserve.devices.ranks.group_device import GroupDevice
from coserve.devices.settings import DeviceSettings
from coserve.errors import DeviceMemoryError, UnknownModelError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile

BLOCK, NUM_PAGES = 4, 3000
PROMPT = tuple(random_tokens(11, 0).tolist())
FAST = Hardware(name="fast", flops_per_s=1e14, bytes_per_s=1e14, call_s=1e-8)
# How long a process that is to end may take.
_END_S = 20.0

_HOOK = """
import sys, time
from pathlib import Path

import torch

from coserve.devices.torch import step as torch_step
from coserve.devices.torch.device import TorchDevice
from coserve.errors import DeviceMemoryError

{before}
execute, forward, rows = TorchDevice.execute, torch_step.forward, []


def failing_execute(self, command):
    ids = [getattr(command, name) for name in command.__struct_fields__[:2]]
    if f"fails-on-{{RANK}}" in ids:
        self._count.add(command)
        raise DeviceMemoryError(f"no room for {{type(command).__name__}}")
    return execute(self, command)


def prepare(self):
    self._spans = self._requests.spans(self._rows)
    rows[:] = [each.request for each in self._rows]


def failing_forward(*given):
    for request in rows:
        if request == f"breaks-on-{{RANK}}":
            raise KeyError("a bug")
        if request == f"full-on-{{RANK}}":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if request == f"sleeps-on-{{RANK}}":
            Path({asleep!r}).touch()
            time.sleep(600)
    return forward(*given)


TorchDevice.execute, torch_step.forward, torch_step.TorchStep._prepare = failing_execute, failing_forward, prepare
"""

# For `failing_group`: rank 1 fails as it starts, before it has joined the others, which wait for
# it.
_FAILS_AT_THE_START = """
from coserve.devices.process import main as process_main

def worthwhile_threads(*given):
    if RANK == 1:
        raise DeviceMemoryError("no room for threads")
    return 1

process_main.worthwhile_threads = worthwhile_threads
"""


def settings(num_ranks: int, **changed: Any) -> DeviceSettings:
    """Return those of a device with the pages of one process, on a tiny model."""
    backbone = make_backbone("llama")
    found = DeviceSettings(
        model=str(model_directory("llama")),
        dtype="float32",
        device="cpu",
        threads=1,
        memory_bytes=NUM_PAGES * kv_page_bytes(backbone, BLOCK) // num_ranks,
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, FAST),
        num_ranks=num_ranks,
    )
    return replace(found, **changed)


def failing_group(
    directory: Path, num_ranks: int, *, before: str = "", **changed: Any
) -> GroupDevice:
    """Return a device whose ranks do what the names of ids say, with the debug check of
    collectives.

    before: Python that each rank runs first, which finds its number as RANK.
    """
    hook = _HOOK.format(asleep=str(directory / "asleep"), before=before)
    return GroupDevice(settings(num_ranks, **changed), start=forking(partial(_prepare, hook)))


def _prepare(hook: str, rank: int) -> None:
    """Have this process be a rank that fails."""
    os.environ["COSERVE_RANK_CHECK"] = "1"
    exec(hook, {"RANK": rank})


def are_gone(pids: tuple[int, ...]) -> bool:
    """Return whether processes have ended, zombies included, or do so shortly."""
    start_s = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() - start_s > _END_S:
            return False
        time.sleep(0.01)
    return True


def generates_as_one_process(driver: Driver) -> bool:
    """Return whether a request gets the tokens of transformers."""
    tokens = driver.generate("request", PROMPT, greedy(4))
    driver.device.execute(CloseRequest("request"))
    return tuple(tokens) == expected_tokens(PROMPT, 4)


def group_says_why_it_cannot_start(directory: Path, **changed: Any) -> bool:
    """Return whether what keeps all ranks from starting is raised as it is, and what keeps one of
    them with its number.

    changed: settings of the device.
    """
    with pytest.raises(UnknownModelError, match="'/nowhere' is not a directory"):
        failing_group(directory, 2, model="/nowhere", **changed)
    with pytest.raises(DeviceMemoryError, match=r"^no room for threads \(on rank 1\)$"):
        failing_group(directory, 2, before=_FAILS_AT_THE_START, threads=None, **changed)
    return True


def begin(driver: Driver, request: str) -> None:
    """Begin a step of one request."""
    driver.open(request, greedy(1))
    rows = RequestRows(request, 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)
    driver.device.submit(StepBatch(step=0, requests=(rows,)))
