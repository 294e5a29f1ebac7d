"""A pack's pages go back as it needs them no more, wherever they lie."""

from random import Random

import pytest

from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.pack_pages import OWNER, PackPages
from coserve.tuning.cursor import Cursor

SIZES = (5, 2, 3, 0, 4, 1)


def pool_with_holes(seed: int) -> PageAllocator:
    """Of 60 pages; the first seed has no holes."""
    pool, random = PageAllocator(60, 64), Random(seed)
    if seed:
        pool.take("kv", 60)
        pool.give_back("kv", [page for page in range(60) if random.random() < 0.8])
    return pool


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_trained_parts", [0, 3, 4, 5])
def test_pages_go_back_one_part_after_another(seed, num_trained_parts):
    pool = pool_with_holes(seed)
    num_free = pool.num_free
    runs = pool.take_runs(OWNER, SIZES)
    pages, cursor = (
        PackPages(pool, runs, num_trained_parts),
        Cursor(num_rows=8, num_trained=8, num_parts=4),
    )
    assert list(pages.places) == [(run.start, len(run)) for run in runs]
    held = dict(enumerate(SIZES))

    def follow() -> None:
        pages.follow(cursor)
        pool.check_integrity()
        assert pages.num_pages == sum(held.values()) == len(pages.pages)
        assert pool.num_free == num_free - pages.num_pages
        assert all(not pool.is_free(page) for page in pages.pages)
        assert [place for place in pages.places if place[1]] == [
            (run.start, len(run)) for group, run in enumerate(runs) if held.get(group)
        ]

    cursor.advance_forward(4)
    follow()
    cursor.advance_forward(4)
    for group in range(1, len(SIZES) - num_trained_parts):
        del held[group]
    follow()
    follow()
    cursor.advance_loss(8)
    for part in range(min(3, num_trained_parts)):
        cursor.advance_tasklets(8, 1)
        del held[len(SIZES) - 1 - part]
        follow()
    pages.release()
    assert pages.num_pages == 0 and pool.num_free == num_free
    pages.release()
    pool.check_integrity()
    assert pool.num_pages_by_owner().get(OWNER, 0) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_pack_that_came_with_fewer_groups_gives_back_those(seed):
    pool = pool_with_holes(seed)
    num_free, taken = pool.num_free, iter(pool.take_runs(OWNER, SIZES[:1] + SIZES[3:]))
    pages = PackPages(
        pool, [None if group in (1, 2) else next(taken) for group in range(len(SIZES))], 3
    )
    assert pages.num_pages == sum(SIZES[:1] + SIZES[3:])
    cursor = Cursor(num_rows=8, num_trained=8, num_parts=3)
    cursor.advance_forward(8)
    cursor.advance_loss(8)
    cursor.advance_tasklets(8, 1)
    pages.follow(cursor)
    assert pages.num_pages == sum(SIZES[:1] + SIZES[3:5])
    pages.release()
    pool.check_integrity()
    assert pool.num_free == num_free


def test_a_group_without_pages_may_lie_anywhere():
    """Every empty range equals every other one."""
    pool = PageAllocator(8, 64)
    pool.take("kv", 4)
    first, second, third = pool.take_runs(OWNER, (1, 1, 1))
    pages = PackPages(pool, [first, range(0), second, third], 0)
    cursor = Cursor(num_rows=8, num_trained=8, num_parts=3)
    cursor.advance_forward(8)
    pages.follow(cursor)
    assert pages.num_pages == 1 and pool.num_free == 3
    pages.release()
    assert pages.num_pages == 0 and pool.num_free == 4
    pool.check_integrity()
