"""The journal of a batch: small however often lines are tried, and whole whatever happens
meanwhile."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from small_disk import small_disk

from coserve.server.batches.deaths import LineDeaths
from coserve.server.batches.journal import BatchJournal

IDS = [f"{number:03}" + "x" * 509 for number in range(32)]
DEATHS = {"deadly": LineDeaths(num=2, num_lines=1)}


def num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def try_lines(journal: BatchJournal, ids: list[str], num_times: int) -> None:
    for _ in range(num_times):
        for id in ids:
            journal.begin(id)
        for id in ids:
            journal.leave(id)


def test_it_stays_small_while_lines_are_tried_again_and_again(tmp_path: Path):
    journal = BatchJournal(tmp_path)
    journal.died(DEATHS)
    journal.begin("answered")
    try_lines(journal, IDS, 100)
    journal.begin(IDS[7])
    assert num_bytes(tmp_path) < 600_000, "three million bytes were written"
    for each in (journal, BatchJournal(tmp_path)):
        assert each.read() == ({"answered", IDS[7]}, DEATHS)


def test_one_that_has_much_to_say_is_not_written_anew_each_time(tmp_path: Path):
    """Its size is that of its lines, and twice that is room for more."""
    journal = BatchJournal(tmp_path)
    many = {f"{number}" + "y" * 500 for number in range(2000)}
    for id in many:
        journal.begin(id)
    before = num_bytes(tmp_path)
    try_lines(journal, IDS, 20)
    assert num_bytes(tmp_path) > before + 500_000
    assert journal.read() == (many, {})


def test_at_rest_only_deaths_are_left(tmp_path: Path):
    journal = BatchJournal(tmp_path)
    journal.begin("a")
    journal.rest()
    assert num_bytes(tmp_path) == 0 and journal.read() == (set(), {})
    journal.begin("a")
    journal.died(DEATHS)
    died = num_bytes(tmp_path)
    journal.rest()
    assert num_bytes(tmp_path) < died and journal.read() == (set(), DEATHS)
    journal.begin("b")
    assert BatchJournal(tmp_path).read() == ({"b"}, DEATHS)


def in_threads(do: Callable[[int], None], number: int) -> None:
    threads = [Thread(target=do, args=(each,)) for each in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_lines_of_several_threads_are_kept_while_it_is_written_anew(tmp_path: Path):
    journal = BatchJournal(tmp_path)

    def work(thread: int) -> None:
        try_lines(journal, IDS[thread::4], 60)
        journal.begin(IDS[thread])

    in_threads(work, 4)
    assert num_bytes(tmp_path) < 600_000
    assert journal.read() == (set(IDS[:4]), {})


def test_on_a_full_disk_nothing_of_it_is_lost_and_it_rests_without_room(tmp_path: Path):
    with small_disk(tmp_path / "disk", size="64k") as disk:
        journal = BatchJournal(disk.path)
        journal.begin("a")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            try_lines(journal, IDS, 1)
        under_way, _ = BatchJournal(disk.path).read()
        assert "a" in under_way
        journal.rest()
        assert journal.read() == (set(), {})
