"""Commands that ranks take back, and those that they do beside steps, where one of them fails or is
busy.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from devices import Driver
from engines import expected_tokens, greedy
from rank_devices import PROMPT, begin, failing_group
from rank_training import CONFIG, num_trained, packs
from safetensors.torch import load_file
from support import random_tokens

from coserve.adapters import LoraConfig
from coserve.adapters.file_names import WEIGHTS_FILE
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.messages.commands import CloseGrammar, CountCommands
from coserve.devices.messages.jobs import (
    CombineContributions,
    ReadContributions,
    TakeCheckpoint,
    TakeContribution,
    WriteCheckpoint,
)
from coserve.devices.messages.pages import MovePages
from coserve.devices.messages.steps import RequestRows, Update
from coserve.devices.process.child import DeviceProcess
from coserve.devices.torch.exchange import CONTRIBUTION_FILE
from coserve.errors import AdapterError, DeviceGoneError, DeviceMemoryError
from coserve.tuning.shard import Shard

LORA = LoraConfig(r=4, target_modules="all-linear").to_peft()
SYNCHRONOUS: dict[str, Any] = {
    "synchronization": "synchronous",
    "every_steps": 1,
    "meet_every_steps": 0,
}
OTHER = tuple(random_tokens(11, 5).tolist())


def test_pages_that_one_rank_cannot_move_stay_where_they_are_on_all(tmp_path):
    before = """
from coserve.memory.tensors.paged_kv import PagedKv
move = PagedKv.move

def failing(self, pages, targets):
    if RANK == 1 and 0 in pages:
        raise MemoryError("none here")
    return move(self, pages, targets)

PagedKv.move = failing
"""
    device = failing_group(tmp_path, 2, before=before)
    driver = Driver(device)

    def next_token(
        request: str, start: int, tokens: tuple[int, ...], pages: tuple[int, ...] = ()
    ) -> int:
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


def test_gradients_that_one_rank_cannot_give_are_given_once_when_asked_again(tmp_path):
    """The other rank has them again, so that a contribution is what it is of a group without a
    failure."""
    before = """
from coserve.devices.torch.exchange import TorchExchange
take, failures = TorchExchange.take, [MemoryError("none here")]

def failing(self, gradients, moments):
    if RANK == 1 and failures:
        raise failures.pop()
    return take(self, gradients, moments)

TorchExchange.take = failing
"""
    given = []
    for name, program in (("failing", before), ("plain", "")):
        directory = tmp_path / name
        directory.mkdir()
        device = failing_group(directory, 2, before=program)
        driver, shard = (
            Driver(device),
            Shard(index=0, count=2, directory=str(directory), **SYNCHRONOUS),
        )
        opened = driver.open_trainer("job", CONFIG, adapter=LORA, shard=shard)
        for sequences in packs(1):
            driver.train("job", opened, sequences)
        if program:
            with pytest.raises(DeviceMemoryError, match=r"^none here \(on rank 1\)$"):
                device.execute(TakeContribution("job", "copy"))
        for _ in range(2):  # who asks again gets the same one
            device.execute(TakeContribution("job", "copy"))
        device.execute(WriteCheckpoint("copy", str(directory)))
        given.append(load_file(directory / CONTRIBUTION_FILE))
        device.close()
    assert given[0].keys() == given[1].keys() and any(map(torch.Tensor.any, given[0].values()))
    assert all(torch.equal(tensor, given[1][name]) for name, tensor in given[0].items())


def test_contributions_that_one_rank_cannot_read_are_read_once_when_asked_again(tmp_path):
    before = """
from coserve.devices.torch.exchange import TorchExchange
from coserve.errors import AdapterError
read, failures = TorchExchange.read, [AdapterError("not here yet")]

def failing(self, directories):
    if RANK == 1 and failures:
        raise failures.pop()
    return read(self, directories)

TorchExchange.read = failing
"""
    device = failing_group(tmp_path, 2, before=before)
    driver, shard = Driver(device), Shard(index=0, count=2, directory=str(tmp_path), **SYNCHRONOUS)
    opened = driver.open_trainer("job", CONFIG, adapter=LORA, shard=shard)
    norms = []
    for number, sequences in enumerate(packs(2), 1):
        driver.train("job", opened, sequences)
        written = tmp_path / f"of step {number}"
        written.mkdir()
        device.execute(TakeContribution("job", f"copy {number}"))
        device.execute(WriteCheckpoint(f"copy {number}", str(written)))
        reading = ReadContributions("job", (str(written),) * 2)
        if number == 1:
            with pytest.raises(AdapterError, match=r"^not here yet \(on rank 1\)$"):
                device.execute(reading)
        device.execute(reading)
        device.execute(CombineContributions("job", 2 * number))
        norms.append(driver.step(updates=[Update("job", num_trained(sequences), 4)]).norms["job"])
        total = sum(
            float(tensor.double().square().sum())
            for tensor in load_file(written / CONTRIBUTION_FILE).values()
        )
        assert norms[-1] == pytest.approx(2 * total**0.5 / num_trained(sequences), rel=1e-4)
        driver.reuse_pages()
    device.close()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("synchronization", ["synchronous", "local-sgd"])
def test_contributions_that_one_rank_cannot_take_in_are_taken_in_once_when_asked_again(
    synchronization, moment, tmp_path
):
    """All ranks take them in again, with the collectives of what is derived from parameters."""
    before = f"""
from coserve.devices.torch.trainer import TorchTrainer
combine, failures = TorchTrainer.combine, [MemoryError("none here")]

def failing(self, *given, **named):
    if RANK == 1 and failures and {moment == "before"}:
        raise failures.pop()
    taken_in = combine(self, *given, **named)
    if RANK == 1 and failures:
        taken_in()
        raise failures.pop()
    return taken_in

TorchTrainer.combine = failing
"""
    adapter = LoraConfig(r=4, use_dora=True, target_modules="all-linear").to_peft()
    made = []
    for name, program in (("failing", before), ("plain", "")):
        (directory := tmp_path / name).mkdir()
        device = failing_group(directory, 2, before=program)
        settings = {**SYNCHRONOUS, "synchronization": synchronization, "meet_every_steps": 1}
        shard = Shard(index=0, count=2, directory=str(directory), **settings)
        driver = Driver(device)
        opened = driver.open_trainer("job", CONFIG, adapter=adapter, shard=shard)
        norms = []
        for number, sequences in enumerate(packs(2), 1):
            driver.train("job", opened, sequences)
            update = [Update("job", num_trained(sequences), 4)]
            if synchronization == "local-sgd":
                norms.append(driver.step(updates=update).norms["job"])
            (written := directory / f"of step {number}").mkdir()
            device.execute(TakeContribution("job", f"copy {number}"))
            device.execute(WriteCheckpoint(f"copy {number}", str(written)))
            device.execute(ReadContributions("job", (str(written),) * 2))
            combination = CombineContributions("job", 2 * number, meets=True)
            if program and number == 1:
                with pytest.raises(DeviceMemoryError, match=r"^none here \(on rank 1\)$"):
                    device.execute(combination)
            device.execute(combination)
            if synchronization == "synchronous":
                norms.append(driver.step(updates=update).norms["job"])
            driver.reuse_pages()
        device.execute(TakeCheckpoint("job", "last"))
        device.execute(WriteCheckpoint("last", str(directory)))
        made.append((norms, load_file(directory / WEIGHTS_FILE)))
        device.close()
    (norms, parameters), (expected_norms, expected) = made
    assert norms == expected_norms and parameters.keys() == expected.keys()
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in expected.items())


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
def test_an_end_says_how_the_rank_ended_though_another_rank_told_of_it_first(
    tmp_path, monkeypatch, in_step
):
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
