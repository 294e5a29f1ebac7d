"""A device of several ranks, which are processes: against one process, and when a rank fails, dies or stands still."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random

import pytest
import rank_devices
import torch
from devices import Driver
from engines import adapter_directory, expected_tokens, greedy
from rank_devices import are_gone, failing_group
from support import model_directory, random_tokens

from coserve.devices import cpu_threads
from coserve.devices.cpu_threads import share_of_cores, worthwhile_threads
from coserve.devices.grammar import Grammar
from coserve.devices.group_device import GroupDevice
from coserve.devices.matching import Vocabulary
from coserve.devices.messages import (
    CloseGrammar,
    CloseRequest,
    CountCommands,
    DropVersion,
    OpenGrammar,
    OpenVersion,
    SetVocabulary,
)
from coserve.devices.rank_process import DeviceProcess
from coserve.devices.step_messages import RequestRows, StepBatch
from coserve.errors import (
    AdapterError,
    BudgetError,
    DeviceGoneError,
    DeviceMemoryError,
    RequestError,
    UnknownModelError,
)

NUM_KILLS = 50
PROMPT = tuple(random_tokens(11, 0).tolist())


@pytest.fixture(scope="module", params=[1, 2])
def group(request, tmp_path_factory) -> Iterator[GroupDevice]:
    device = failing_group(tmp_path_factory.mktemp("ranks"), request.param)
    yield device
    device.close()


@pytest.fixture
def driver(group) -> Driver:
    return Driver(group)


def num_ranks(driver: Driver) -> int:
    return len(driver.device.pids)


def generates_as_one_process(driver: Driver) -> bool:
    """Return whether a request gets the tokens of transformers."""
    tokens = driver.generate("request", PROMPT, greedy(4))
    driver.device.execute(CloseRequest("request"))
    return tuple(tokens) == expected_tokens(PROMPT, 4)


def begin(driver: Driver, request: str) -> None:
    """Begin a step of one request."""
    driver.open(request, greedy(1))
    rows = RequestRows(request, 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True)
    driver.device.submit(StepBatch(step=0, requests=(rows,)))


# -- what ranks do together -----------------------------------------------------------


def test_requests_in_any_chunks_get_the_tokens_of_transformers(driver):
    for number, chunk in enumerate((1000, 5, 1)):
        tokens = driver.generate(f"r{number}", PROMPT, greedy(8), chunk=chunk)
        assert tuple(tokens) == expected_tokens(PROMPT, 8)


def test_requests_of_two_versions_share_a_step(driver):
    lora = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
    assert driver.device.execute(OpenVersion("v", adapter_directory(**lora))).num_bypasses == 6
    rows = []
    for version in ("", "v"):
        driver.open(f"of {version}", greedy(1), version=version)
        rows.append(RequestRows(f"of {version}", 0, PROMPT, driver.pages_for(len(PROMPT)), samples=True))
    result = driver.step(requests=rows)
    assert (result.tokens["of "].token,) == expected_tokens(PROMPT, 1)
    assert (result.tokens["of v"].token,) == expected_tokens(PROMPT, 1, **lora)
    driver.step(commands=[CloseRequest("of v"), DropVersion("v")])


def test_each_rank_has_its_own_process_and_a_share_of_the_cores(driver):
    pids = driver.device.pids
    cores = [os.sched_getaffinity(pid) for pid in pids]
    mine = os.sched_getaffinity(0)
    assert len(set(pids)) == len(pids) and os.getpid() not in pids
    if len(mine) >= len(pids):
        assert set.union(*cores) <= mine and sum(map(len, cores)) == len(set.union(*cores))


def test_ranks_share_cores_so_that_near_ones_stay_together(tmp_path, monkeypatch):
    """Two packages of two cores, each of two threads that the system numbers apart; and one that is left over."""
    monkeypatch.setattr(cpu_threads, "_CPUS", tmp_path)
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    cores = set(range(8))
    assert [share_of_cores(cores, rank, 2) for rank in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [share_of_cores(cores, rank, 4) for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert [share_of_cores({3, 5, 9}, rank, 2) for rank in range(2)] == [{9}, {5}], "as many for each"
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


def test_an_error_of_all_ranks_names_none(driver):
    with pytest.raises(AdapterError, match=r"^/nowhere has no adapter_config.json; give .*save_pretrained$"):
        driver.device.execute(OpenVersion("w", "/nowhere"))
    assert generates_as_one_process(driver)


def test_a_grammar_that_is_wrong_is_refused_for_what_it_is(driver):
    """Rank 0 alone compiles it; users do not hear of ranks."""
    letters = tuple(bytes([each]) for each in range(255))
    driver.device.execute(SetVocabulary(Vocabulary(pieces=(*letters, b""), special=(), ends=(255,))))
    with pytest.raises(RequestError) as raised:
        driver.device.execute(OpenGrammar(Grammar(kind="regex", text="(")))
    assert "rank" not in str(raised.value)
    assert driver.device.execute(OpenGrammar(Grammar(kind="regex", text="a+"))).num_bytes > 0
    driver.device.execute(CloseGrammar(Grammar(kind="regex", text="a+")))


def test_a_command_of_a_step_that_one_rank_cannot_do_ends_the_step_where_it_stands(driver):
    """So the commands after it are done on no rank, and those before it on all."""
    for rank in range(num_ranks(driver)):
        before = num_answered(driver)
        commands = [DropVersion("nothing"), CloseRequest(f"fails-on-{rank}"), DropVersion("nothing")]
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


# -- ends -----------------------------------------------------------------------------


def test_a_group_that_cannot_start_says_why():
    for changed, error, message in (
        ({"model": "/nowhere"}, UnknownModelError, "'/nowhere' is not a directory"),
        ({"memory_bytes": 1}, BudgetError, r"^the page pool needs [0-9]+ bytes or more, for two pages$"),
    ):
        with pytest.raises(error, match=message):
            GroupDevice(rank_devices.settings(2, **changed))


def test_an_error_at_the_start_of_one_rank_ends_that_of_all(tmp_path):
    """Before it has joined the others, which wait for it."""
    before = """
from coserve.devices import cpu_threads
from coserve.errors import DeviceMemoryError

def worthwhile_threads(*given):
    if RANK == 1:
        raise DeviceMemoryError("no room for threads")
    return 1

cpu_threads.worthwhile_threads = worthwhile_threads
"""
    with pytest.raises(DeviceMemoryError, match=r"^no room for threads \(on rank 1\)$"):
        failing_group(tmp_path, 2, before=before, threads=None)


@pytest.mark.long
def test_a_rank_that_dies_at_the_start_ends_that_of_all(tmp_path):
    with pytest.raises(DeviceGoneError, match=r"^rank 1 \(process \d+\) has ended before it was ready$"):
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


def test_a_rank_that_stands_still_ends_the_group(tmp_path):
    device = failing_group(tmp_path, 2, rank_timeout_s=1.0)
    assert generates_as_one_process(Driver(device))
    os.kill(device.pids[1], signal.SIGSTOP)
    with pytest.raises(DeviceGoneError, match=r"rank 1 \(process \d+\) did not come within 1 s"):
        device.execute(CountCommands())
    assert are_gone(device.pids)
    device.close()


@pytest.mark.long
def test_calls_in_other_threads_end_with_the_group(tmp_path):
    device = failing_group(tmp_path, 2)
    begin(Driver(device), "sleeps-on-1")
    wait_for(tmp_path / "asleep")
    with ThreadPoolExecutor() as pool:
        opened = pool.submit(device.execute, OpenVersion("v", adapter_directory()))
        closed = pool.submit(device.execute, CloseGrammar(Grammar(kind="regex", text="a")))
        device.close()
        for each in (opened, closed):
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
        "import time; from coserve.devices.group_device import GroupDevice; from rank_devices import settings\n"
        "device = GroupDevice(settings(2)); print(*device.pids, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join([str(Path(rank_devices.__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = tuple(map(int, parent.stdout.readline().split()))
        parent.kill()
        parent.wait()
    assert len(pids) == 2 and are_gone(pids)


@pytest.mark.long
def test_no_rank_outlives_another_one_whenever_that_is_killed(tmp_path):
    """Fifty times: at a random moment of requests, commands and steps, a random rank."""
    random, noticed_s = Random(7), list[float]()
    for number in range(NUM_KILLS):
        directory = tmp_path / str(number)
        directory.mkdir()
        device = failing_group(directory, 2)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(work_until_gone, device)
            time.sleep(random.uniform(0.0, 0.5))
            os.kill(random.choice(device.pids), signal.SIGKILL)
            killed_s = time.monotonic()
            noticed_s.append(ended.result(60) - killed_s)
        assert are_gone(device.pids), f"an orphan of kill {number}"
        device.close()
    noticed_s.sort()
    assert noticed_s[len(noticed_s) // 2] < 1.0, noticed_s
    assert noticed_s[-1] < 10.0, noticed_s


def work_until_gone(device: GroupDevice) -> float:
    """Return when a device that does all kinds of things has gone."""
    try:
        for number in count():
            driver = Driver(device)  # which gives out pages from the bottom again
            device.execute(OpenVersion("v", adapter_directory()))
            driver.generate(f"plain {number}", PROMPT, greedy(3), chunk=5)
            driver.generate(f"with {number}", PROMPT, greedy(3), version="v")
            closed = [CloseRequest(f"plain {number}"), CloseRequest(f"with {number}"), DropVersion("v")]
            driver.step(commands=closed)
    except DeviceGoneError:
        return time.monotonic()
    raise AssertionError("it works for ever")


def on_rank(driver: Driver, rank: int) -> str:
    """Return what follows an error of one rank."""
    return f" (on rank {rank})" if num_ranks(driver) > 1 else ""


def num_answered(driver: Driver) -> int:
    return driver.device.execute(CountCommands()).num_answered


def wait_for(path: Path) -> None:
    """Wait until a rank has written a file."""
    start_s = time.monotonic()
    while not path.exists():
        assert time.monotonic() - start_s < 120
        time.sleep(0.001)
