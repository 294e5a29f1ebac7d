"""A device of processes that `torch.distributed` connects (gloo, on CPUs), as one on GPUs would be
by NCCL."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import Driver
from engines import adapter_directory, expected_tokens, greedy
from rank_devices import (
    PROMPT,
    are_gone,
    begin,
    failing_group,
    group_says_why_it_cannot_start,
    settings,
)
from rank_training import CONFIG, num_trained, packs
from safetensors.torch import load_file
from torch import distributed as dist

from coserve.adapters import LoraConfig
from coserve.adapters.file_names import WEIGHTS_FILE
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.loading import open_device
from coserve.devices.messages.commands import (
    CloseRequest,
    CountCommands,
    OpenGrammar,
    OpenVersion,
    SaveAdapter,
    SetVocabulary,
)
from coserve.devices.messages.jobs import PublishVersion
from coserve.devices.messages.steps import Update
from coserve.devices.ranks.group_device import GroupDevice
from coserve.errors import AdapterError, DeviceGoneError, DeviceMemoryError, RequestError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not dist.is_available(), reason="PyTorch was built without torch.distributed"
    ),
]
BY_TORCH: dict[str, Any] = {"rank_transport": "torch_distributed"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupDevice]:
    device = failing_group(tmp_path_factory.mktemp("ranks"), 2, **BY_TORCH)
    yield device
    device.close()


@pytest.fixture
def driver(shared: GroupDevice) -> Driver:
    return Driver(shared)


def serves(driver: Driver) -> bool:
    """Return whether requests, without an adapter and with one, get the tokens of transformers."""
    lora: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    driver.device.execute(OpenVersion("v", adapter_directory(**lora)))
    plain = driver.generate("plain", PROMPT, greedy(6), chunk=5)
    adapted = driver.generate("adapted", PROMPT, greedy(6), version="v")
    for request in ("plain", "adapted"):
        driver.device.execute(CloseRequest(request))
    return tuple(plain) == expected_tokens(PROMPT, 6) and tuple(adapted) == expected_tokens(
        PROMPT, 6, **lora
    )


def test_requests_get_the_tokens_of_transformers(driver: Driver):
    assert serves(driver)


def test_an_optimizer_step_comes_to_what_it_comes_to_on_one_rank(driver: Driver, tmp_path: Path):
    found = []
    for name, each in (
        ("ranks", driver),
        ("alone", Driver(open_device(settings(1), lambda *progress: None))),
    ):
        opened = each.open_trainer(
            "job", CONFIG, adapter=LoraConfig(r=4, target_modules="all-linear").to_peft()
        )
        for sequences in packs(2):
            each.train("job", opened, sequences, window=9, tasklet=9)
            each.step(updates=[Update("job", num_trained(sequences), 4)])
            each.reuse_pages()
        each.device.execute(PublishVersion("job", "trained"))
        each.device.execute(SaveAdapter("trained", str(tmp_path / name)))
        found.append(load_file(tmp_path / name / WEIGHTS_FILE))
    assert found[0].keys() == found[1].keys() and any(tensor.any() for tensor in found[0].values())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], atol=1e-5, rtol=1e-3)


def test_what_is_refused_leaves_the_group_as_it_was(shared: GroupDevice):
    driver = Driver(shared)
    letters = tuple(bytes([each]) for each in range(255))
    driver.device.execute(
        SetVocabulary(Vocabulary(pieces=(*letters, b""), special=(), ends=(255,)))
    )
    pids = shared.pids
    with pytest.raises(RequestError):  # by rank 0 alone
        driver.device.execute(OpenGrammar(Grammar(kind="regex", text="(")))
    with pytest.raises(AdapterError, match=r"^/nowhere has no adapter_config.json"):  # by both
        driver.device.execute(OpenVersion("w", "/nowhere"))
    for rank in range(2):
        with pytest.raises(
            DeviceMemoryError, match=rf"^no room for OpenVersion \(on rank {rank}\)$"
        ):
            driver.device.execute(OpenVersion(f"fails-on-{rank}", adapter_directory()))
    assert shared.pids == pids and serves(driver)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_within_a_step_of_one_rank_is_that_of_all(driver: Driver, rank: int):
    begin(driver, f"breaks-on-{rank}")
    with pytest.raises(RuntimeError) as raised:
        driver.device.collect()
    assert str(raised.value) == f"KeyError: 'a bug' (on rank {rank})"
    begin(driver, f"full-on-{rank}")
    failure = driver.device.collect().failure
    assert failure is not None and "CUDA out of memory" in failure.message
    assert serves(driver)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_meet_again_end_with_an_error_that_names_the_first(
    tmp_path: Path, rank: int
):
    """A collective of GPUs that one of them has not launched ends so."""
    before = f"""
from coserve.kernels.groups.torch_distributed import TorchGroup

leave = TorchGroup._leave

def leave_apart(self, reason):
    self._num_launched += self.rank == {1 - rank}
    leave(self, reason)

TorchGroup._leave = leave_apart
"""
    device = failing_group(tmp_path, 2, before=before, **BY_TORCH)
    begin(Driver(device), f"breaks-on-{rank}")
    expected = rf"^rank {rank} failed: 'a bug'; the group ends, since ranks have done different collectives$"
    with pytest.raises(DeviceGoneError, match=expected):
        device.collect()
    assert are_gone(device.pids)
    device.close()


@pytest.mark.parametrize(("killed", "is_in_step"), [(1, False), (0, True)])
def test_the_end_of_a_rank_is_noticed(tmp_path: Path, killed: int, is_in_step: bool):
    device = failing_group(tmp_path, 2, **BY_TORCH)
    driver = Driver(device)
    assert serves(driver)
    if is_in_step:
        begin(driver, "sleeps-on-1")
    os.kill(device.pids[killed], signal.SIGKILL)
    with pytest.raises(DeviceGoneError, match=r"ended"):
        device.collect() if is_in_step else device.execute(CountCommands())
    assert are_gone(device.pids), "an orphan, before the device is closed"
    device.close()


def test_a_rank_that_stands_still_ends_the_group(tmp_path: Path):
    device = failing_group(tmp_path, 2, rank_timeout_s=1.0, **BY_TORCH)
    assert serves(Driver(device))
    os.kill(device.pids[1], signal.SIGSTOP)
    with pytest.raises(DeviceGoneError, match=re.escape("a rank has ended or does not answer: ")):
        device.execute(CountCommands())
    assert are_gone(device.pids)
    device.close()


def test_a_group_that_cannot_start_says_why(tmp_path: Path):
    assert group_says_why_it_cannot_start(tmp_path, **BY_TORCH)
