"""A device of several ranks, which are processes, against one process, and when one of them
fails."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import rank_devices
import torch
from devices import Driver
from engines import adapter_directory, expected_tokens, greedy
from rank_devices import PROMPT, begin, failing_group, generates_as_one_process
from support import model_directory, random_sequences

from coserve.adapters import LoraConfig
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.grammars.matching import Vocabulary
from coserve.devices.loading import open_device
from coserve.devices.messages.commands import (
    CloseGrammar,
    CloseRequest,
    CountCommands,
    DropVersion,
    OpenGrammar,
    OpenVersion,
    SetVocabulary,
)
from coserve.devices.messages.jobs import CloseTrainer, DropTrainer
from coserve.devices.messages.steps import RequestRows, Tasklets, Update
from coserve.devices.process import cpu_threads
from coserve.devices.process.cpu_threads import share_of_cores, worthwhile_threads
from coserve.devices.ranks.group_device import GroupDevice
from coserve.errors import (
    AdapterError,
    DeviceMemoryError,
    RequestError,
)
from coserve.tuning.config import OptimizerConfig, TuningConfig

SEQUENCES = random_sequences((9, 14, 6))
NUM_TRAINED = sum(sum(trained[1:]) for _, trained in SEQUENCES)
LORA = LoraConfig(r=4, alpha=8, target_modules="all-linear").to_peft()
CONFIG = TuningConfig(seed=3, optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3))


@pytest.fixture(scope="module", params=[1, 2])
def group(request, tmp_path_factory) -> Iterator[GroupDevice]:
    device = failing_group(tmp_path_factory.mktemp("ranks"), request.param)
    yield device
    device.close()


@pytest.fixture
def driver(group) -> Driver:
    return Driver(group)


def num_ranks(driver: Driver) -> int:
    device: Any = driver.device
    return len(device.pids)


# -- what ranks do together -----------------------------------------------------------


def test_requests_in_any_chunks_get_the_tokens_of_transformers(driver):
    for number, chunk in enumerate((1000, 5, 1)):
        tokens = driver.generate(f"r{number}", PROMPT, greedy(8), chunk=chunk)
        assert tuple(tokens) == expected_tokens(PROMPT, 8)


def test_requests_of_two_versions_share_a_step(driver):
    lora: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    assert driver.device.execute(OpenVersion("v", adapter_directory(**lora))).num_bypasses == 6
    rows = []
    for version in ("", "v"):
        driver.open(f"of {version}", greedy(1), version=version)
        rows.append(
            RequestRows(f"of {version}", 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)
        )
    result = driver.step(requests=rows)
    assert (result.tokens["of "].token,) == expected_tokens(PROMPT, 1)
    assert (result.tokens["of v"].token,) == expected_tokens(PROMPT, 1, **lora)
    driver.step(commands=[CloseRequest("of v"), DropVersion("v")])


def test_a_job_beside_a_request_trains_as_in_one_process(driver):
    """Two optimizer steps, of which the second shows what the first has changed."""
    found = []
    for each in (Driver(open_device(rank_devices.settings(1))), driver):
        opened = each.open_trainer("job", CONFIG, adapter=LORA)
        packs = [each.train("job", opened, SEQUENCES, window=7, tasklet=5).packs["job"]]
        norms = [each.step(updates=[Update("job", NUM_TRAINED, 2)]).norms["job"]]
        each.forward_and_loss("job", opened, SEQUENCES)
        each.open("beside", greedy(1))
        rows = RequestRows("beside", 0, PROMPT, each.pages_for(len(PROMPT)), samples=True)
        result = each.step(requests=[rows], tasklets=[Tasklets("job", 1000, 3)])
        assert (result.tokens["beside"].token,) == expected_tokens(PROMPT, 1)
        packs.append(result.packs["job"])
        last = each.step(updates=[Update("job", NUM_TRAINED, 2)], commands=[CloseRequest("beside")])
        norms.append(last.norms["job"])
        each.step(commands=[CloseTrainer("job"), DropTrainer("job")])
        found.append(([pack.loss for pack in packs], norms))
    (losses, norms), (losses_of_ranks, norms_of_ranks) = found
    assert losses[1] < 0.99 * losses[0]
    assert losses_of_ranks == pytest.approx(losses, rel=1e-5)
    assert norms_of_ranks == pytest.approx(norms, rel=1e-4)


def test_each_rank_has_its_own_process_and_a_share_of_the_cores(driver):
    pids = driver.device.pids
    cores = [os.sched_getaffinity(pid) for pid in pids]
    mine = os.sched_getaffinity(0)
    assert len(set(pids)) == len(pids) and os.getpid() not in pids
    if len(mine) >= len(pids):
        assert set.union(*cores) <= mine and sum(map(len, cores)) == len(set.union(*cores))


def test_ranks_share_cores_so_that_near_ones_stay_together(tmp_path, monkeypatch):
    """Two packages of two cores, each of two threads that the system numbers apart; and one that is
    left over."""
    monkeypatch.setattr(cpu_threads, "_CPUS", tmp_path)
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    cores = set(range(8))
    assert [share_of_cores(cores, rank, 2) for rank in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [share_of_cores(cores, rank, 4) for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert [share_of_cores({3, 5, 9}, rank, 2) for rank in range(2)] == [{9}, {5}], (
        "as many for each"
    )
    assert share_of_cores(cores, 0, 9) == set()


def test_threads_are_shared_by_ranks_unless_the_model_is_small(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [worthwhile_threads("dummy:qwen2.5-0.5b", number) for number in (1, 3, 16)] == [8, 2, 1]
    assert worthwhile_threads(str(model_directory("llama")), 2) == 1


def test_commands_of_a_step_are_counted_once(driver):
    before = num_answered(driver)
    driver.open("counted", greedy(1))
    driver.step(commands=[CloseRequest("counted"), DropVersion("nothing")])
    assert num_answered(driver) == before + 3


# -- failures of one rank -------------------------------------------------------------


def test_a_command_that_one_rank_cannot_do_is_undone_on_the_others(driver):
    for rank in range(num_ranks(driver)):
        version = f"fails-on-{rank}"
        with pytest.raises(DeviceMemoryError) as raised:
            driver.device.execute(OpenVersion(version, adapter_directory()))
        assert str(raised.value) == "no room for OpenVersion" + on_rank(driver, rank)
        with pytest.raises(RuntimeError, match=f"^KeyError: '{version}'$"):  # on all ranks alike
            driver.open("r", greedy(1), version=version)
        driver.device.execute(CloseRequest("r"))
        assert generates_as_one_process(driver)


def test_a_trainer_that_one_rank_cannot_open_is_taken_back_on_the_others(driver):
    for rank in range(num_ranks(driver)):
        job = f"fails-on-{rank}"
        with pytest.raises(DeviceMemoryError) as raised:
            driver.open_trainer(job, CONFIG, adapter=LORA)
        assert str(raised.value) == "no room for OpenTrainer" + on_rank(driver, rank)
        with pytest.raises(RuntimeError, match=f"^KeyError: '{job}'"):  # on all ranks alike
            driver.try_step(updates=[Update(job, 1, 1)])
        assert generates_as_one_process(driver)


def test_an_error_of_all_ranks_names_none(driver):
    with pytest.raises(
        AdapterError, match=r"^/nowhere has no adapter_config.json; give .*save_pretrained$"
    ):
        driver.device.execute(OpenVersion("w", "/nowhere"))
    assert generates_as_one_process(driver)


def test_a_grammar_that_is_wrong_is_refused_for_what_it_is(driver):
    """Rank 0 alone compiles it; users do not hear of ranks."""
    letters = tuple(bytes([each]) for each in range(255))
    driver.device.execute(
        SetVocabulary(Vocabulary(pieces=(*letters, b""), special=(), ends=(255,)))
    )
    with pytest.raises(RequestError) as raised:
        driver.device.execute(OpenGrammar(Grammar(kind="regex", text="(")))
    assert "rank" not in str(raised.value)
    assert driver.device.execute(OpenGrammar(Grammar(kind="regex", text="a+"))).num_bytes > 0
    driver.device.execute(CloseGrammar(Grammar(kind="regex", text="a+")))


def test_a_command_of_a_step_that_one_rank_cannot_do_ends_the_step_where_it_stands(driver):
    """So the commands after it are done on no rank, and those before it on all."""
    for rank in range(num_ranks(driver)):
        before = num_answered(driver)
        commands = [
            DropVersion("nothing"),
            CloseRequest(f"fails-on-{rank}"),
            DropVersion("nothing"),
        ]
        with pytest.raises(DeviceMemoryError) as raised:
            driver.try_step(commands=commands)
        assert str(raised.value) == "no room for CloseRequest" + on_rank(driver, rank)
        assert num_answered(driver) == before + 2
        assert generates_as_one_process(driver)


def test_a_bug_in_a_step_of_one_rank_is_raised_and_all_continue(driver):
    for rank in range(num_ranks(driver)):
        begin(driver, f"breaks-on-{rank}")
        with pytest.raises(RuntimeError) as raised:
            driver.device.collect()
        assert str(raised.value) == "KeyError: 'a bug'" + on_rank(driver, rank)
        driver.device.execute(CloseRequest(f"breaks-on-{rank}"))
        assert generates_as_one_process(driver)


def test_a_step_for_which_one_rank_has_no_memory_has_failed_on_all(driver):
    for rank in range(num_ranks(driver)):
        begin(driver, f"full-on-{rank}")
        failure = driver.device.collect().failure
        assert failure is not None and "CUDA out of memory" in failure.message
        driver.device.execute(CloseRequest(f"full-on-{rank}"))
        assert generates_as_one_process(driver)


def on_rank(driver: Driver, rank: int) -> str:
    """Return what follows an error of one rank."""
    return f" (on rank {rank})" if num_ranks(driver) > 1 else ""


def num_answered(driver: Driver) -> int:
    counted: Any = driver.device.execute(CountCommands())
    return int(counted.num_answered)
