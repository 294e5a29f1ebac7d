"""Jobs take turns by what they have run since they came."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coserve.engine.jobs.job_set import ServedRows


@dataclass
class Ran:
    """As much of a job as counts here."""

    id: str
    num_rows_run: float = 0.0


def served(turns: ServedRows, *jobs: Ran, idle: Sequence[str] = ()) -> dict[str, float]:
    running: list[Any] = list(jobs)
    return turns.of(running, [job.id for job in jobs if job.id not in idle])


def test_what_comes_later_stands_with_the_one_served_least():
    turns, first, second = ServedRows(), Ran("first", 500.0), Ran("second", 700.0)
    assert served(turns, first, second) == {"first": 500.0, "second": 700.0}
    late = Ran("late")
    assert served(turns, first, second, late)["late"] == 500.0
    late.num_rows_run += 30.0
    first.num_rows_run += 100.0
    assert served(turns, first, second, late) == {"first": 600.0, "second": 700.0, "late": 530.0}


def test_a_job_alone_is_what_others_are_held_against():
    turns, alone = ServedRows(), Ran("alone", 5.0)
    served(turns, alone)
    alone.num_rows_run = 900.0
    assert served(turns, alone, Ran("late"))["late"] == 900.0


def test_who_comes_back_has_saved_up_nothing():
    turns, stays, leaves = ServedRows(), Ran("stays", 100.0), Ran("leaves", 100.0)
    served(turns, stays, leaves)
    stays.num_rows_run = 400.0
    served(turns, stays)
    assert served(turns, stays, leaves)["leaves"] == 400.0


def test_who_had_much_before_does_not_wait_until_others_have_had_as_much():
    """Resumed from a checkpoint, or paused for long."""
    turns = ServedRows()
    served(turns, Ran("few", 10.0))
    assert served(turns, Ran("few", 10.0), Ran("resumed", 1e6)) == {"few": 10.0, "resumed": 10.0}
    assert served(turns, Ran("few", 10.0), Ran("resumed", 1e6 + 500)) == {
        "few": 10.0,
        "resumed": 510.0,
    }


def test_who_has_no_work_holds_nobody_down():
    turns, waits, works = ServedRows(), Ran("waits", 1000.0), Ran("works", 1000.0)
    served(turns, waits, works)
    works.num_rows_run = 1e6
    served(turns, waits, works, idle=["waits"])
    late = Ran("late")
    assert served(turns, waits, works, late, idle=["waits"])["late"] == 1e6
    assert served(turns, waits, works, late) == {"waits": 1e6, "works": 1e6, "late": 1e6}, (
        "it has saved up nothing"
    )
