"""What ranks take back, and what they do beside steps: where one of them fails, or is busy."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from devices import Driver
from engines import expected_tokens, greedy
from rank_devices import PROMPT, begin, failing_group
from support import random_tokens

from coserve.devices.grammar import Grammar
from coserve.devices.messages import CloseGrammar, CountCommands
from coserve.devices.rank_process import DeviceProcess
from coserve.devices.step_messages import RequestRows
from coserve.devices.swap_messages import MovePages
from coserve.errors import DeviceGoneError, DeviceMemoryError

OTHER = tuple(random_tokens(11, 5).tolist())


def test_pages_that_one_rank_cannot_move_stay_where_they_are_on_all(tmp_path):
    before = """
from coserve.memory.paged_kv import PagedKv
move = PagedKv.move

def failing(self, pages, targets):
    if RANK == 1 and 0 in pages:
        raise MemoryError("none here")
    return move(self, pages, targets)

PagedKv.move = failing
"""
    device = failing_group(tmp_path, 2, before=before)
    driver = Driver(device)

    def next_token(request: str, start: int, tokens: tuple[int, ...], pages: tuple[int, ...] = ()) -> int:
        rows = RequestRows(request, start, tokens, pages, samples=True)
        return driver.step(requests=[rows]).tokens[request].token

    driver.open("moved", greedy(4))
    found = [next_token("moved", 0, PROMPT, (0, 1, 2, 3))]
    with pytest.raises(DeviceMemoryError, match=r"\(on rank 1\)$"):
        device.execute(MovePages((0, 1, 2), (10, 11, 12)))
    driver.open("other", greedy(1))
    next_token("other", 0, OTHER, (10, 11, 12))  # which are free, as the engine knows it
    for number in range(3):
        found.append(next_token("moved", len(PROMPT) + number, (found[-1],)))
    assert tuple(found) == expected_tokens(PROMPT, 4)
    device.close()


def test_a_command_that_cannot_be_taken_back_ends_the_group(tmp_path):
    before = """
def undo(self, command):
    raise MemoryError("none here")

TorchDevice.undo = undo
"""
    device = failing_group(tmp_path, 2, before=before)
    with pytest.raises(DeviceGoneError, match="rank 0 cannot take back OpenRequest: none here"):
        Driver(device).open("fails-on-1", greedy(1))
    device.close()


@pytest.mark.parametrize("in_step", [True, False])
def test_an_end_says_how_the_rank_ended_though_another_rank_told_of_it_first(tmp_path, monkeypatch, in_step):
    device = failing_group(tmp_path, 2)
    returncode = DeviceProcess.returncode

    def late(self: DeviceProcess, wait_s: float = 0.0) -> int | None:
        time.sleep(0.3)
        return returncode(self, wait_s)

    monkeypatch.setattr(DeviceProcess, "returncode", late)
    if in_step:
        begin(Driver(device), "sleeps-on-1")
    os.kill(device.pids[1], signal.SIGKILL)
    with pytest.raises(DeviceGoneError) as raised:
        device.collect() if in_step else device.execute(CountCommands())
    assert raised.value.returncode == -signal.SIGKILL
    device.close()


def test_a_grammar_is_closed_while_a_step_is_under_way(tmp_path):
    device: Any = failing_group(tmp_path, 2)
    begin(Driver(device), "sleeps-on-1")
    # It would wait for minutes if it had to wait for the step.
    device.execute(CloseGrammar(Grammar(kind="regex", text="a")))
    device.close()


def test_ranks_outlast_the_thread_that_has_started_them(tmp_path):
    with ThreadPoolExecutor() as pool:
        device: Any = pool.submit(failing_group, tmp_path, 2).result()
    assert device.execute(CountCommands()).num_answered == 0
    device.close()
