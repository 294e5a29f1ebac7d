"""Ranks end every step alike: by the clock of rank 0, and by what went wrong on any of them."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from devices import Driver
from engines import (
    adapter_directory,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
)
from lockstep import lockstep
from msgspec.structs import replace as struct_replace
from rank_processes import IMPLEMENTATIONS, run_processes
from rank_tasks import end_steps
from support import random_sequences

import coserve.devices.torch.adapter_memory as adapter_memory
import coserve.devices.torch.requests as torch_requests
import coserve.devices.torch.step as torch_step
from coserve.adapters import LoraConfig
from coserve.devices.messages.steps import StepFailure, Tasklets, Update
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.timing import HostTimer
from coserve.errors import AdapterTooLargeError, RankError
from coserve.kernels.groups.base import RankGroup
from coserve.tuning.config import TuningConfig

LORA = LoraConfig(r=2).to_peft()
SEQUENCES = random_sequences((9, 14, 6))
NUM_TRAINED = sum(sum(trained[1:]) for _, trained in SEQUENCES)


@pytest.fixture(autouse=True)
def checked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSERVE_RANK_CHECK", "1")


def fail_at(group: RankGroup, number: int, error: Exception) -> Counter[str]:
    """Have a rank fail before its sum or gather of this number, counted from now on; return how
    many it has called."""
    found, kinds = Counter[str](), ("_sum", "_gather")
    for kind in kinds:
        real = getattr(group, kind)

        def call(*given: Any, real: Any = real) -> Any:
            found["calls"] += 1
            if found["calls"] == number:
                raise error
            return real(*given)

        setattr(group, kind, call)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_running_out_of_memory_on_one_rank_anywhere_is_the_failure_of_the_step_on_all(rank):
    """Memory runs out before the k-th collective of a step; the engine continues, with the same
    tokens as if nothing had happened.
    """
    expected = expected_tokens(prompts_of((6,))[0], 5)
    number = 0
    while True:
        number += 1
        engine = make_engine(num_ranks=2)
        device = lockstep(engine)
        id = engine.add(prompts_of((6,))[0], greedy(5))
        calls = fail_at(device.groups[rank], number, torch.OutOfMemoryError("no room\nfor it"))
        events, failures = engine.step(), [result.failure for result in device.results]
        assert failures[0] == failures[1], "one verdict"
        if calls["calls"] < number:
            break
        assert failures[0] == StepFailure(message=f"no room for it (on rank {rank})")
        events += drain(engine)
        assert tokens_by_request(events)[id] == expected
        device.close()
    assert number > 5 and failures == [None, None]
    device.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_fails_on_one_rank_is_broken_on_all(rank):
    """Two jobs' updates in one step: those before the one that breaks stand, those after it can be
    made again."""
    broken, number = list[str | None](), 0
    while True:
        number += 1
        engine = make_engine(num_ranks=2)
        driver, device = Driver(lockstep(engine)), lockstep(engine)
        for job in ("a", "b"):
            opened = driver.open_trainer(job, TuningConfig(), adapter=LORA)
            driver.train(job, opened, SEQUENCES)
        updates = {job: Update(job, NUM_TRAINED, 3) for job in ("a", "b")}
        calls = fail_at(device.groups[rank], number, torch.OutOfMemoryError("no room"))
        result = driver.try_step(updates=list(updates.values()))
        same = [(each.failure, each.norms) for each in device.results]
        assert same[0] == same[1], "one verdict"
        if result.failure is None:
            assert number > calls["calls"] and result.norms.keys() == {"a", "b"}
            break
        broken.append(result.failure.broken_update)
        left = [job for job in ("a", "b") if job not in result.norms and job != broken[-1]]
        assert left == (["b"] if broken[-1] == "a" else [])
        again = driver.step(updates=[updates[job] for job in left])
        assert again.norms.keys() == set(left)
        device.close()
    device.close()
    assert broken == ["a"] * (len(broken) // 2) + ["b"] * (len(broken) // 2) and len(broken) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_any_other_error_of_one_rank_is_raised_on_all(rank):
    engine = make_engine(num_ranks=2)
    device = lockstep(engine)
    engine.add(prompts_of((6,))[0], greedy(5))
    fail_at(device.groups[rank], 2, RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        engine.step()
    [other] = [error for error in device.errors if isinstance(error, RankError)]
    assert str(other) == f"RuntimeError: a defect (on rank {rank})"
    again = engine.add(prompts_of((4,))[0], greedy(3))
    assert tokens_by_request(drain(engine))[again] == expected_tokens(prompts_of((4,))[0], 3), (
        "they can continue"
    )
    device.close()


def test_rank_0_that_fails_as_it_chooses_takes_the_others_along(monkeypatch):
    """They have given their part of the logits, and wait at the step's end."""
    engine, failing = make_engine(num_ranks=2), [True]
    real = vars(torch_requests)["sample"]

    def sample(*given: Any) -> Any:
        if failing and failing.pop():
            raise MemoryError("no memory for the scores")
        return real(*given)

    monkeypatch.setattr(torch_requests, "sample", sample)
    prompt = prompts_of((6,))[0]
    id = engine.add(prompt, SamplingParams(max_tokens=5, temperature=0.0, logprobs=0))
    events = engine.step()
    expected = StepFailure(message="no memory for the scores (on rank 0)")
    assert [result.failure for result in lockstep(engine).results] == [expected] * 2
    assert tokens_by_request([*events, *drain(engine)])[id] == expected_tokens(prompt, 5)


class FastClock(HostTimer):
    """A hundredth of a second later each time it is read; three hundredths on one of the ranks."""

    fast_rank = 0

    def __init__(self) -> None:
        super().__init__()
        self._num_read = 0

    def elapsed_s(self) -> float:
        self._num_read += 1
        is_fast = threading.current_thread().name.startswith(f"rank {self.fast_rank}")
        return self._num_read * (0.03 if is_fast else 0.01)


@pytest.mark.parametrize(("fast_rank", "num_tasklets"), [(0, 3), (1, 7)])
def test_the_clock_of_rank_0_says_when_tasklets_end(monkeypatch, fast_rank, num_tasklets):
    """Whichever rank's clock runs three times as fast: all run as many, the first before any clock
    is read."""
    monkeypatch.setattr(FastClock, "fast_rank", fast_rank)
    monkeypatch.setattr(torch_step, "section_timer", lambda device: FastClock())
    engine = make_engine(num_ranks=2)
    driver = Driver(lockstep(engine))
    opened = driver.open_trainer("job", TuningConfig(), adapter=LORA)
    driver.forward_and_loss("job", opened, SEQUENCES)
    driver.step(tasklets=[Tasklets("job", 4, 20)], backward_limit_s=0.065)
    assert [result.num_tasklets for result in lockstep(engine).results] == [
        {"job": num_tasklets}
    ] * 2
    driver.device.close()


def test_a_rank_that_has_no_memory_for_an_adapter_has_it_refused_on_all(monkeypatch):
    """Memory runs out at any of its checks; nothing is left of the adapter, and the next one is
    loaded.
    """
    real, num_checks, number = vars(adapter_memory)["available_bytes"], 0, 0

    def available_bytes(device: torch.device) -> int:
        nonlocal num_checks
        if not threading.current_thread().name.startswith("rank 1"):
            return real(device)
        num_checks += 1
        return 0 if num_checks == number else real(device)

    monkeypatch.setattr(adapter_memory, "available_bytes", available_bytes)
    engine, directory = make_engine(num_ranks=2), adapter_directory(r=3)
    device = lockstep(engine)
    while num_checks >= number:
        number, num_checks = number + 1, 0
        try:
            engine.load_adapter(f"a{number}", directory)
        except AdapterTooLargeError:
            assert len({(type(error), str(error)) for error in device.errors}) == 1
            assert not any(each._versions for each in device.ranks), "nothing is left of it"
    assert number > 1
    prompt = prompts_of((6,))[0]
    id = engine.add(prompt, greedy(5), adapter=f"a{number}")
    assert tokens_by_request(drain(engine))[id] == expected_tokens(prompt, 5, r=3)


def test_ranks_that_are_given_different_steps_notice(monkeypatch):
    engine = make_engine(num_ranks=2)
    device = lockstep(engine)
    real = device.ranks[1].submit
    monkeypatch.setattr(
        device.ranks[1], "submit", lambda batch: real(struct_replace(batch, step=batch.step + 1))
    )
    engine.add(prompts_of((6,))[0], greedy(5))
    with pytest.raises(RankError, match="ranks have different steps"):
        engine.step()


# -- processes --------------------------------------------------------------------------


@IMPLEMENTATIONS
def test_processes_agree_on_how_steps_end(is_plain):
    """Some of 200 ends have failures of some ranks, before or after others have come; sums between
    them are right.
    """
    found = run_processes(
        3, end_steps, 200, is_plain=is_plain, environment={"COSERVE_RANK_CHECK": "1"}
    )
    assert found[0] == found[1] == found[2], "the same verdict on all ranks"
    kinds = Counter(None if failure is None else failure.kind for failure in found[0])
    assert kinds.keys() == {None, "memory", "error"} and min(kinds.values()) > 20
    assert any(failure and failure.broken_update == "job" for failure in found[0])
