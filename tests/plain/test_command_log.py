"""The ordered log of commands: each reaches the device once, in order, wherever its callers are
interrupted."""

import ast
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import coserve
from coserve.devices.base import CommandCount
from coserve.devices.messages import commands as messages
from coserve.devices.messages.commands import (
    BESIDE_STEPS,
    CloseGrammar,
    CloseRequest,
    Command,
    CountCommands,
    DropVersion,
    OpenRequest,
    Reply,
    VersionOpened,
)
from coserve.devices.messages.jobs import PlaceOptimizer, PublishVersion, ResizeWindow
from coserve.devices.messages.pages import SwapIn, SwapOut
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.command_log import CommandLog, LostCommandError
from coserve.errors import DeviceGoneError, DeviceMemoryError

A, B, C, D = (DropVersion(name) for name in "abcd")
REPLY = VersionOpened(7)


class Device:
    """Notes what is done. at: called before each command and step ("submit", "collect"); may raise
    what hits it."""

    def __init__(self) -> None:
        self.info: Any = None
        self.clock: Any = SimpleNamespace(now=lambda: 0.0)
        self.done: list[Command] = []
        self.at: Callable[[Command | str], None] = lambda action: None
        self._count = CommandCount()

    def execute(self, command: Command) -> Reply:
        self.at(command)
        if isinstance(command, CountCommands):
            return self._count.reply()
        self._count.add(command)
        self.done.append(command)
        return REPLY if isinstance(command, PublishVersion) else None

    def submit(self, batch: StepBatch) -> None:
        for command in batch.commands:
            self.execute(command)
        self.at("submit")

    def collect(self) -> StepResult:
        self.at("collect")
        return StepResult(step=0)

    def close(self) -> None: ...


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def log(device):
    return CommandLog(device)


def step(log: CommandLog) -> None:
    log.submit(StepBatch(step=0, commands=log.head()))
    log.collect()


def once(device: Device, action: object, error: BaseException) -> None:
    """Have the device hit by an error, the next time that it comes to this."""

    def hit(each: Command | str) -> None:
        if each == action:
            device.at = lambda action: None
            raise error

    device.at = hit


def opened(request: str) -> OpenRequest:
    return OpenRequest(request=request, params=SamplingParams(), seed=0, pages=(1, 2))


def test_a_step_takes_all_commands_and_those_that_come_meanwhile_wait(device, log):
    log.send(A)
    log.send(B)
    batch = StepBatch(step=0, commands=log.head())
    log.submit(batch)
    log.send(C)
    log.collect()
    assert batch.commands == (A, B) and device.done == [A, B]
    step(log)
    assert device.done == [A, B, C]
    assert log.head() == ()


def test_a_command_with_a_reply_comes_after_all_that_stand_before_it(device, log):
    log.send(A)
    assert log.execute(PublishVersion("job", "v")) == REPLY
    assert device.done == [A, PublishVersion("job", "v")]


def test_commands_of_a_step_that_was_interrupted_are_done_once_and_before_all_others(device):
    for place in (A, B, C, "submit", "collect"):
        log, device = CommandLog(device := Device()), device
        for command in (A, B, C):
            log.send(command)
        once(device, place, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            step(log)
        log.send(D)
        log.flush()
        assert device.done == [A, B, C, D], place


def test_what_is_flushed_while_a_step_is_under_way_is_done_once_as_well(device, log):
    """A caller that was interrupted between the two halves of a step may not know of it."""
    log.send(A)
    log.submit(StepBatch(step=0, commands=log.head()))
    log.send(B)
    once(device, B, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    log.collect()
    log.flush()
    assert device.done == [A, B]


def test_a_command_whose_caller_was_interrupted_was_done_by_then_or_never_is(device, log):
    """The caller has given up what came of it, or asks again."""

    def interrupted_after(command: Command) -> Reply:
        execute(command)
        device.execute = execute
        raise KeyboardInterrupt

    execute = device.execute
    once(device, A, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.execute(A)
    log.send(B)
    log.flush()
    device.execute = interrupted_after
    with pytest.raises(KeyboardInterrupt):
        log.execute(C)
    log.execute(D)
    assert device.done == [B, C, D]


def test_an_error_is_the_answer_of_its_command(device, log):
    log.send(A)
    once(device, B, DeviceMemoryError("full"))
    with pytest.raises(DeviceMemoryError, match="full"):
        log.execute(B)
    log.execute(C)
    assert device.done == [A, C]


@pytest.mark.parametrize(
    "error", [DeviceMemoryError("full"), OSError("full"), RuntimeError("full")], ids=repr
)
def test_an_error_of_a_command_that_was_sent_is_no_answer_to_a_caller_of_another(
    device, log, error
):
    """That caller would handle it as its own, and what the first command was to bring would be
    missing."""
    lost: list[str] = []
    log.on_lost = lambda: lost.append("lost")
    log.send(A)
    once(device, A, error)
    with pytest.raises(LostCommandError, match="DropVersion has failed: full") as raised:
        log.execute(B)
    assert lost == ["lost"] and raised.value.__cause__ is error
    log.flush()
    assert device.done == []
    log.execute(C)
    assert device.done == [C] and lost == ["lost"]


def test_commands_that_may_have_failed_while_they_were_interrupted_count_as_lost(device, log):
    lost: list[str] = []
    log.on_lost = lambda: lost.append("lost")
    log.send(A)
    once(device, A, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    assert lost == []
    log.replay()
    log.replay()
    assert lost == ["lost"] and device.done == [A]


def test_a_lost_command_is_told_of_again_where_that_was_interrupted(device, log):
    lost: list[str] = []

    def note() -> None:
        lost.append("lost")
        if len(lost) == 1:
            raise KeyboardInterrupt

    log.on_lost = note
    log.send(A)
    once(device, A, DeviceMemoryError("full"))
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    log.replay()
    assert lost == ["lost", "lost"]


def test_an_error_in_a_replay_is_logged(device, log, caplog):
    """Such as that of a file which has gone with its request."""
    lost: list[str] = []
    log.on_lost = lambda: lost.append("lost")
    log.send(A)
    log.send(B)
    once(device, A, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        step(log)
    once(device, A, DeviceMemoryError("full"))
    with caplog.at_level(logging.WARNING):
        log.replay()
        step(log)
    assert device.done == [B] and "full" in caplog.text and lost == ["lost"]


def test_a_defect_is_raised_also_in_a_replay(device, log):
    log.send(A)
    once(device, A, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    once(device, A, AssertionError("a defect"))
    with pytest.raises(LostCommandError, match="a defect"):
        log.flush()


def test_a_device_that_is_gone_is_owed_nothing(device, log):
    log.send(A)
    log.send(B)
    once(device, A, DeviceGoneError("gone"))
    with pytest.raises(DeviceGoneError):
        log.flush()
    log.send(C)
    log.flush()
    assert device.done == [] and log.head() == ()


def test_commands_that_a_device_did_for_others_before_do_not_count(device):
    device.execute(A)
    log = CommandLog(device)
    log.send(B)
    log.send(C)
    once(device, C, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        step(log)
    log.flush()
    assert device.done == [A, B, C]


def test_what_is_done_beside_steps_does_not_stand_in_the_log(log):
    with pytest.raises(AssertionError):
        log.send(CloseGrammar(None))


def test_a_request_that_is_closed_before_the_device_opened_it_is_not_opened(log):
    """What it follows, such as a grammar, may be gone by then."""
    for command in (opened("a"), opened("b"), CloseRequest("a"), opened("a")):
        log.send(command)
    assert log.head() == (CloseRequest("a"), opened("b"), CloseRequest("a"), opened("a"))


def test_a_request_that_is_closed_while_a_step_opens_it_is_closed_after_it(device, log):
    log.send(opened("a"))
    log.submit(StepBatch(step=0, commands=log.head()))
    log.send(CloseRequest("a"))
    log.collect()
    log.flush()
    assert device.done == [opened("a"), CloseRequest("a")]


def test_the_window_is_resized_once_where_nothing_is_written_to_pages_meanwhile(log):
    copied, moments = SwapOut((1,), (0,)), PlaceOptimizer("job", 4, 2)
    for command in (
        ResizeWindow(0, 0),
        copied,
        ResizeWindow(5, 9),
        SwapIn((5,), (0,)),
        ResizeWindow(6, 8),
        moments,
    ):
        log.send(command)
    assert log.head() == (
        copied,
        ResizeWindow(5, 9),
        SwapIn((5,), (0,)),
        ResizeWindow(6, 8),
        moments,
    )
    log.send(ResizeWindow(7, 7))
    assert log.head()[-3:] == (ResizeWindow(6, 8), moments, ResizeWindow(7, 7))


@pytest.mark.parametrize("seed", range(40))
def test_however_often_callers_are_interrupted_each_command_is_done_once_and_in_order(seed):
    """Or never, if a caller of `execute` was interrupted before it was done."""
    rng, device = Random(seed), Device()
    log, sent, execute = CommandLog(device), list[Command](), device.execute
    given_up: list[Command] = []

    def disturb(action: Command | str) -> None:
        if rng.random() < 0.15:
            raise KeyboardInterrupt

    def disturbed(command: Command) -> Reply:
        reply = execute(command)
        if rng.random() < 0.15:
            raise KeyboardInterrupt
        return reply

    device.at, device.execute = disturb, disturbed  # type: ignore[method-assign]
    for number in range(200):
        command = DropVersion(f"{number}")
        with suppress(KeyboardInterrupt):
            match rng.randrange(4):
                case 0 | 1:
                    sent.append(command)
                    log.send(command)
                case 2:
                    sent.append(command)
                    given_up.append(command)
                    log.execute(command)
                    given_up.remove(command)
                case _:
                    step(log)
        if command in given_up and command not in device.done:
            sent.remove(command)
    device.at, device.execute = lambda action: None, execute  # type: ignore[method-assign]
    log.flush()
    assert device.done == sent and given_up


def device_calls(path: Path) -> list[str]:
    """Return the commands that a file of the package gives to a device by itself, by their classes'
    names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "execute"
        ):
            target = ast.unparse(node.func.value)
            if target.endswith("device"):
                argument = node.args[0]
                found.append(
                    ast.unparse(argument.func if isinstance(argument, ast.Call) else argument)
                )
    return found


def test_nothing_reaches_a_device_beside_the_log_but_what_is_done_beside_steps():
    package = Path(coserve.__file__).parent
    called: list[str] = []
    for folder in ("engine", "handover", "jobs", "worker"):
        for path in (package / folder).rglob("*.py"):
            if path.name not in (
                "command_log.py",
                "activity.py",
                "ranks.py",
            ):  # the others wrap a device
                called += device_calls(path)
    assert called and {*called} <= {kind.__name__ for kind in BESIDE_STEPS}
    assert {*BESIDE_STEPS} <= {*messages.Command.__args__}
