"""Whose fault an engine's death is: of jobs that it worked for, and of nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import children_of

from coserve.engine_client.last_activity import LastActivity
from coserve.jobs.deaths import Deaths, after_death


def test_a_death_with_one_job_is_its_own_whatever_it_did_before():
    suspected = dict[str, Deaths]()
    for step in (3, 20, 60):
        assert "bad" not in suspected or not suspected["bad"].are_too_many
        suspected = after_death(suspected, {"bad": step})
    assert suspected == {"bad": Deaths(num=3, step=60)}
    assert suspected["bad"].are_too_many
    assert suspected["bad"].alone_until_step == 160


def test_of_several_each_is_suspected_until_it_is_known_which():
    suspected = after_death({}, {"bad": 5, "other": 7})
    assert suspected == {"bad": Deaths(num=0, step=5), "other": Deaths(num=0, step=7)}
    assert after_death(suspected, {}) == suspected, "it worked for requests alone"
    assert after_death(suspected, {"bad": 6}) == {"bad": Deaths(num=1, step=6)}
    assert after_death({"bad": Deaths(num=1, step=6)}, {"other": 2})["bad"].num == 1, (
        "it has had one of its own"
    )


def test_the_furthest_that_a_job_had_come_counts():
    suspected = after_death(after_death({}, {"job": 50}), {"job": 10})  # it had begun anew
    assert suspected == {"job": Deaths(num=2, step=50)}


CHILD = """
import os, signal, sys
from coserve.worker.activity import Activity
activity = Activity(sys.argv[1])
activity.note(frozenset(("a", "b")))
activity.note(frozenset())
with activity.{doing}("c"):
    {before}
    {last_act}
"""


def last_error(
    path: Path, last_act: str, *, doing: str = "of", before: str = "pass"
) -> tuple[LastActivity, "subprocess.Popen[bytes]"]:
    """Return the record of a process that notes its work and then does its last act, and the
    process.
    """
    activity = LastActivity(path)
    command = [
        sys.executable,
        "-c",
        CHILD.format(last_act=last_act, doing=doing, before=before),
        str(path),
    ]
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
    activity, process = last_error(tmp_path / "activity", last_act)
    assert activity.jobs_at_death(process.wait(60), hung=hung) == jobs


@pytest.mark.parametrize(
    ("before", "jobs"),
    [
        ("pass", ("c",)),
        ("activity.note(frozenset('a')); activity.note(frozenset())", ("c",)),
        ("activity.note(frozenset('a'))", ("a",)),
    ],
)
def test_a_job_whose_files_are_read_is_under_way_while_the_device_rests(
    tmp_path: Path, before: str, jobs: tuple[str, ...]
):
    activity, process = last_error(
        tmp_path / "activity", "os._exit(3)", doing="files_of", before=before
    )
    assert activity.jobs_at_death(process.wait(60), hung=False) == jobs


def test_a_death_while_a_request_is_taken_in_is_no_jobs(tmp_path: Path):
    """The device's last step, which worked for a job, is over."""
    before = "activity.note(frozenset('a')); taken = activity.of_request(); taken.__enter__()"
    activity, process = last_error(tmp_path / "activity", "os._exit(3)", before=before)
    assert activity.jobs_at_death(process.wait(60), hung=False) == ()


def test_a_process_that_somebody_has_stopped_does_not_hang(tmp_path: Path):
    activity, process = last_error(tmp_path / "activity", "os.kill(os.getpid(), signal.SIGSTOP)")
    os.waitpid(process.pid, os.WUNTRACED)
    assert activity.is_stopped()
    process.kill()
    process.wait(60)
    assert not activity.is_stopped()


def test_nor_does_one_whose_rank_somebody_has_stopped(tmp_path: Path):
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    last_act = f"import subprocess; subprocess.run([sys.executable, '-c', {stopped!r}])"
    activity, process = last_error(tmp_path / "activity", last_act)
    while not activity.is_stopped():
        assert process.poll() is None
        time.sleep(0.01)
    [rank] = children_of(process.pid)
    os.kill(rank, signal.SIGKILL)
    process.wait(60)
    assert not activity.is_stopped()


def test_without_a_file_nothing_is_known(tmp_path: Path):
    activity = LastActivity(tmp_path / "nowhere" / "activity")
    assert activity.path is None and not activity.is_stopped()
    assert activity.jobs_at_death(1, hung=False) is None
    assert activity.jobs_at_death(-signal.SIGKILL, hung=False) == ()
