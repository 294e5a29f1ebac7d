"""The sandbox: whatever a call does, it costs that call alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from crashing_tasks import Obedient
from processes import children_of, is_alive

from coserve.devices.grammars.checker import GrammarChecker
from coserve.devices.grammars.matching import Vocabulary
from coserve.errors import RequestError, SandboxError
from coserve.sandbox.sandbox import Sandbox
from coserve.sandbox.task import CallLimits

LIMITS = CallLimits(memory_bytes=64 << 20, stack_bytes=256 << 10, cpu_s=1, wall_s=60.0)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Obedient, "ab", LIMITS)
    yield made
    made.close()


def wait_until_gone(*pids: int) -> None:
    until_s = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_a_call_finds_the_prepared_state_as_it_was(sandbox: Sandbox):
    assert [sandbox.run(("say", 2)) for _ in range(2)] == [["abab", 1]] * 2
    large = 1 << 20  # more than a socket holds
    assert sandbox.run(("say", large))[0] == "ab" * large


@pytest.mark.parametrize(
    ("deed", "number", "failure"),
    [
        ("fault", 0, "crashed"),
        ("overflow", 8 << 20, "crashed"),
        ("fail", 0, "crashed"),
        ("be_killed", 0, "killed"),
        ("be_unstarted", 0, "unstarted"),
        ("allocate", 1 << 30, "memory"),
        ("allocate_and_abort", 0, "memory"),
        ("compute", 60, "time"),
    ],
)
def test_a_call_that_goes_wrong_says_why_and_costs_itself_alone(
    sandbox: Sandbox, deed: str, number: int, failure: str
):
    sandbox.run(("say", 1))
    before = sandbox.pid
    with pytest.raises(SandboxError) as error:
        sandbox.run((deed, number))
    assert error.value.failure == failure, error.value
    assert sandbox.run(("say", 1)) == ["ab", 1]
    assert sandbox.pid == before


def test_a_call_whose_thread_cannot_start_is_not_taken_for_one_that_crashes():
    """No address space is left for its stack, as at a limit of threads."""
    with (
        OwnSandbox(replace(LIMITS, memory_bytes=-(140 << 20))) as own,
        pytest.raises(SandboxError) as error,
    ):
        own.run(("say", 1))
    assert error.value.failure == "unstarted"


def test_a_call_that_a_busy_machine_holds_up_is_late():
    with (
        OwnSandbox(replace(LIMITS, wall_s=1.0)) as own,
        pytest.raises(SandboxError, match="within 1 s") as error,
    ):
        own.run(("sleep", 60))
    assert error.value.failure == "late"


def test_calls_run_beside_each_other(sandbox: Sandbox):
    with ThreadPoolExecutor(8) as threads:
        slow = [threads.submit(sandbox.run, ("sleep", 1)) for _ in range(4)]
        quick = [threads.submit(sandbox.run, ("say", 1)) for _ in range(4)]
        assert [each.result() for each in quick] == [["ab", 1]] * 4
        assert not all(each.done() for each in slow)
        assert [each.result() for each in slow] == [None] * 4


def test_nothing_secret_is_inherited(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("COSERVE_API_KEY", "secret")
    with OwnSandbox() as own, socket.socket() as listening, (tmp_path / "file").open("w"):
        os.set_inheritable(listening.fileno(), True)
        environment, files, _, _ = own.run(("surroundings", 0))
    assert "COSERVE_API_KEY" not in environment
    assert len(files) == 1 and files[0].startswith("socket:")  # its own, by which the call came


class OwnSandbox:
    """A sandbox that ends with the block."""

    def __init__(self, limits: CallLimits = LIMITS) -> None:
        self.made = Sandbox(Obedient, "ab", limits)

    def __enter__(self) -> Sandbox:
        return self.made

    def __exit__(self, *_: object) -> None:
        self.made.close()


def test_a_template_that_was_killed_is_replaced():
    with OwnSandbox() as own:
        own.run(("say", 1))
        before = own.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert own.run(("say", 1)) == ["ab", 1]
        assert own.pid != before
        wait_until_gone(before)


def test_it_rests_and_is_there_again():
    with OwnSandbox() as own:
        own.run(("say", 1))
        before = own.pid
        assert before is not None
        own.rest()
        assert own.pid is None
        wait_until_gone(before)
        assert own.run(("say", 1)) == ["ab", 1]


def test_no_process_outlives_the_one_that_started_it():
    code = (
        "import sys, threading, time\n"
        "from crashing_tasks import Obedient\n"
        "from coserve.sandbox.sandbox import Sandbox\n"
        "sandbox = Sandbox(Obedient, 'ab')\n"
        "print(sandbox.pid or sandbox.run(('surroundings', 0))[3], flush=True)\n"
        "threading.Thread(target=sandbox.run, args=(('sleep', 60),)).start()\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        template = int(process.stdout.readline())
        until_s = time.monotonic() + 10
        while not (call := children_of(template)) and time.monotonic() < until_s:
            time.sleep(0.01)
        process.kill()
    assert call
    wait_until_gone(template, *call)


def test_the_template_starts_without_torch():
    code = "import sys, coserve.sandbox.template; print(sorted({'torch', 'numpy', 'asyncio'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_grammars_are_refused_in_one_line_where_there_are_no_sandboxes(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(RequestError, match=r"^structured output needs Linux: "):
        GrammarChecker(Vocabulary((b"a",), (), ()))
