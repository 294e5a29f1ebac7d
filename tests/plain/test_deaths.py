"""Whose fault an engine's death is: of jobs that it worked for, and of nobody."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coserve.jobs.deaths import Deaths, note_death
from coserve.worker.activity import LastActivity


def test_a_death_with_one_job_is_its_own_whatever_it_did_before():
    bad, other = Deaths(), Deaths()
    for step in (3, 20, 60):
        note_death([(bad, step)], [bad, other])
        bad.note_step(step + 1)
    assert (bad.num, bad.is_suspect, bad.alone_until_step) == (3, True, 160)
    assert other == Deaths()


def test_of_several_each_is_suspected_until_it_is_known_which():
    bad, other, third = Deaths(), Deaths(), Deaths()
    note_death([(bad, 5), (other, 7)], [bad, other, third])
    assert [(each.num, each.alone_until_step) for each in (bad, other, third)] == [(0, 105), (0, 107), (0, 0)]
    note_death([(bad, 6)], [bad, other, third])
    assert [(each.num, each.is_suspect) for each in (bad, other, third)] == [(1, True), (0, False), (0, False)]


def test_deaths_are_forgotten_a_hundred_steps_beyond_the_furthest():
    deaths = Deaths()
    note_death([(deaths, 50)], [deaths])
    note_death([(deaths, 10)], [deaths])  # it had begun anew
    for step in range(149):
        deaths.note_step(step + 1)
    assert deaths.num == 2
    deaths.note_step(150)
    assert deaths == Deaths()


CHILD = """
import os, signal, sys
from coserve.worker.activity import Activity
activity = Activity(sys.argv[1])
activity.note(frozenset(("a", "b")))
activity.note(frozenset())
with activity.of("c"):
    {last_act}
"""


def last_words(path: Path, last_act: str) -> tuple[LastActivity, "subprocess.Popen[bytes]"]:
    """Of a process that notes what it does, and then does its last act."""
    activity = LastActivity(path)
    command = [sys.executable, "-c", CHILD.format(last_act=last_act), str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return activity, subprocess.Popen(command, env=environment)


@pytest.mark.parametrize(
    ("last_act", "hung", "jobs"),
    [
        ("os._exit(3)", False, ("c",)),
        ("os.abort()", False, ("c",)),
        ("os.kill(os.getpid(), signal.SIGKILL)", False, ()),
        ("os.kill(os.getpid(), signal.SIGKILL)", True, ("c",)),
    ],
)
def test_what_a_process_worked_for_is_known_after_its_death(
    tmp_path: Path, last_act: str, hung: bool, jobs: tuple[str, ...]
):
    activity, process = last_words(tmp_path / "activity", last_act)
    assert activity.jobs_at_death(process.wait(60), hung=hung) == jobs


def test_a_process_that_somebody_has_stopped_does_not_hang(tmp_path: Path):
    activity, process = last_words(tmp_path / "activity", "os.kill(os.getpid(), signal.SIGSTOP)")
    os.waitpid(process.pid, os.WUNTRACED)
    assert activity.is_stopped()
    process.kill()
    process.wait(60)
    assert not activity.is_stopped()


def test_without_a_file_nothing_is_known(tmp_path: Path):
    activity = LastActivity(tmp_path / "nowhere" / "activity")
    assert activity.path is None and not activity.is_stopped()
    assert activity.jobs_at_death(1, hung=False) is None
    assert activity.jobs_at_death(-signal.SIGKILL, hung=False) == ()
