"""Pages for packs: neighbours, and no more of the known prefixes forgotten than that takes."""

from random import Random

import pytest

from coserve.devices.messages.commands import Command
from coserve.devices.messages.jobs import PlaceOptimizer, ResizeWindow
from coserve.engine.page_manager import MomentsNeed, PageManager, WindowNeed
from coserve.errors import BudgetError
from coserve.memory.pages.allocator import PageAllocator
from coserve.memory.pages.prefix_index import PrefixOwner
from coserve.memory.pages.run_search import RunSearch
from coserve.tuning.cursor import Cursor

BLOCK, PAGE_BYTES = 4, 64


def broker_with_prefixes(num_pages: int, lengths: list[int]) -> PageManager:
    """A pool in which requests with this many whole blocks each have been answered, one after
    another."""
    manager = PageManager(
        num_pages=num_pages, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    opened = []
    for number, num_blocks in enumerate(lengths):
        tokens = [number] * (num_blocks * BLOCK)
        sequence = manager.cache.open((), len(tokens))
        sequence.reserve(len(tokens))
        sequence.commit(len(tokens), tokens, PrefixOwner(""))
        opened.append(sequence)
    for sequence in opened:
        sequence.close()
    return manager


def known_blocks(manager: PageManager, number: int, num_blocks: int) -> int:
    """How many blocks of one of those prefixes are still known."""
    tokens = [number] * (num_blocks * BLOCK + 1)
    return len(
        manager.cache.prefixes.find(
            manager.cache.prefixes.keys(PrefixOwner(""), tokens), len(tokens)
        )
    )


def test_a_run_of_neighbours_forgets_no_more_prefixes_than_lie_in_it():
    manager = broker_with_prefixes(20, [4, 4, 4, 4])
    assert (manager.pool.num_free, manager.cache.num_available) == (4, 20)
    pack = manager.take_pack([6], 1)
    assert pack.runs == [range(14, 20)], "the free pages, and the two before them"
    assert [known_blocks(manager, number, 4) for number in range(4)] == [4, 4, 4, 2]
    pack.release()
    manager.check_integrity(set(), [])


def test_requests_and_packs_take_the_pages_of_optimizers_as_if_they_were_free():
    sent: list[Command] = []
    manager = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    for job, num_pages in (("first", 6), ("second", 3)):
        manager.place_optimizer(job, num_pages * PAGE_BYTES, num_pack_pages=4)
    assert manager.cache.optimizers.runs == {"first": range(14, 20), "second": range(11, 14)}
    assert sent == [PlaceOptimizer("first", 14, 6), PlaceOptimizer("second", 11, 3)]
    assert (manager.pool.num_free, manager.cache.num_available) == (11, 20)
    pack = manager.take_pack([9, 4], 1)  # 11 pages are free: the youngest makes room
    assert manager.cache.optimizers.runs == {"first": range(14, 20)}
    assert sent[2:] == [PlaceOptimizer("second", 0, 0)]
    request = manager.cache.open((), 7 * BLOCK)
    request.reserve(7 * BLOCK)
    assert not manager.cache.optimizers.runs and sent[3:] == [PlaceOptimizer("first", 0, 0)]
    manager.check_integrity(set(request.pages), [pack])
    request.close()
    pack.release()
    assert manager.pool.num_free == 20


def test_optimizers_get_no_pages_that_others_would_take_at_once():
    manager = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    for num_pages, num_pack_pages in (
        (11, 0),
        (8, 13),
    ):  # more than half of the pool; too many beside a pack
        manager.place_optimizer("job", num_pages * PAGE_BYTES, num_pack_pages=num_pack_pages)
        assert not manager.cache.optimizers.runs
    manager.place_optimizer("job", 8 * PAGE_BYTES, num_pack_pages=12)
    manager.place_optimizer("other", 3 * PAGE_BYTES, num_pack_pages=0)
    assert manager.cache.optimizers.runs.keys() == {"job"}, "all of them have no more than half"


def test_the_device_hears_in_order_where_optimizers_lie():
    sent: list[Command] = []
    manager = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    for job in ("first", "second", "third"):
        manager.place_optimizer(job, 3 * PAGE_BYTES, num_pack_pages=0)
    assert sent == [
        PlaceOptimizer("first", 17, 3),
        PlaceOptimizer("second", 14, 3),
        PlaceOptimizer("third", 11, 3),
    ]
    manager.cache.optimizers.lend(1)
    manager.place_optimizer("fourth", 3 * PAGE_BYTES, num_pack_pages=0)
    told = [PlaceOptimizer("third", 0, 0), PlaceOptimizer("fourth", 11, 3)]
    assert sent[3:] == told, "what leaves pages comes before what takes some"
    manager.cache.optimizers.release("second")  # to the host, say: its own command says so
    manager.cache.optimizers.withdraw("third")
    assert len(sent) == 5, "nothing has changed for the device"


def test_the_device_hears_of_each_size_of_the_window():
    sent: list[Command] = []
    manager = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    manager.window.clear()
    assert not sent, "there is no window to end"
    pack = manager.take_pack([4], 1, WindowNeed(3, 8))
    assert sent[-1] == ResizeWindow(manager.window.run.start, len(manager.window.run))
    pack.release()
    manager.window.clear()
    assert sent[-1] == ResizeWindow(0, 0)
    manager.check_integrity(set(), [])


def test_moments_that_lie_in_the_way_of_their_own_pack_get_pages_with_it():
    sent: list[Command] = []
    manager = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    manager.place_optimizer("above", 6 * PAGE_BYTES, num_pack_pages=0)
    manager.place_optimizer("job", 3 * PAGE_BYTES, num_pack_pages=0, needs_pages=True)
    manager.cache.optimizers.release("above")
    assert dict(manager.cache.optimizers.runs) == {"job": range(11, 14)}
    sent.clear()
    manager.cache.optimizers.hold("job", is_held=True)
    with pytest.raises(BudgetError):
        manager.take_pack([12], 1)
    pack = manager.take_pack([12, 5], 1, moments=MomentsNeed("job", 3))
    (run,) = manager.cache.optimizers.runs.values()
    assert len(run) == 3 and not manager.pool.num_free
    assert sent == [PlaceOptimizer("job", 0, 0), PlaceOptimizer("job", run.start, 3)]
    manager.check_integrity(set(), [pack], ["job"])


def test_pages_that_are_held_are_nobody_elses():
    manager = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    for job in ("first", "second"):
        manager.place_optimizer(job, 5 * PAGE_BYTES, num_pack_pages=0, needs_pages=True)
    manager.cache.optimizers.hold("first", is_held=True)
    assert manager.cache.num_available == 15
    with pytest.raises(BudgetError):
        manager.take_pack([16], 1)
    with pytest.raises(BudgetError):
        manager.cache.take(16)
    assert manager.cache.optimizers.runs.keys() == {"first", "second"}, "nothing is taken"
    manager.take_pack([15], 1).release()
    assert manager.cache.optimizers.runs.keys() == {"first"}
    manager.cache.optimizers.hold("first", is_held=False)
    assert len(manager.cache.take(20)) == 20


def test_a_run_that_cannot_be_had_forgets_nothing():
    manager = broker_with_prefixes(12, [3, 3])
    held = manager.cache.open((), BLOCK)
    held.reserve(
        BLOCK
    )  # the page after the prefixes: what is free or known is 6 pages before it, and 5 after it
    with pytest.raises(
        BudgetError, match="7 neighbouring pages asked for; 5 are free, 5 of them side by side"
    ):
        manager.take_pack([7], 1)
    with pytest.raises(BudgetError):
        manager.take_pack([5, 7], 1)
    assert (manager.pool.num_free, [known_blocks(manager, number, 3) for number in range(2)]) == (
        5,
        [3, 3],
    )
    manager.take_pack([6], 1)
    assert [known_blocks(manager, number, 3) for number in range(2)] == [0, 0]


def test_a_pack_that_fits_is_placed_however_prefixes_lie():
    """The free run in the middle suits the first group, and would leave no three neighbours for the
    last."""
    manager = broker_with_prefixes(10, [2, 4, 4])
    manager.cache.evict_pages(range(2, 6))
    pack = manager.take_pack([4, 3, 3], 1)
    assert pack.num_pages == 10
    pack.release()
    manager.check_integrity(set(), [])
    assert manager.pool.num_free == 10


@pytest.fixture
def num_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often all pages of a pool were looked at, as the only item."""
    look, found = PageAllocator.free_flags, [0]

    def counted(pool: PageAllocator) -> bytes:
        found[0] += 1
        return look(pool)

    monkeypatch.setattr(PageAllocator, "free_flags", counted)
    return found


def test_a_pack_of_many_groups_is_placed_in_one_pass_over_the_pages(num_passes: list[int]):
    manager = broker_with_prefixes(400, [10] * 40)
    assert manager.pool.num_free == 0
    pack = manager.take_pack([9, *[6] * 33], 33)
    assert (num_passes, pack.num_pages) == ([1], 9 + 6 * 33)
    assert manager.cache.num_available == 400 - pack.num_pages
    pack.release()
    manager.check_integrity(set(), [])


def test_what_cannot_be_had_is_not_looked_for_again_until_pages_have_changed(num_passes: list[int]):
    manager = broker_with_prefixes(40, [8, 8, 8, 8])
    held = manager.cache.open((), BLOCK)
    held.reserve(BLOCK)  # the page in the middle: 32 before it, 7 after it
    for _ in range(3):
        with pytest.raises(BudgetError, match="33 neighbouring pages asked for; 7 are free"):
            manager.take_pack([33], 1)
    assert num_passes == [1]
    held.reserve(9 * BLOCK)  # it takes what is free and evicts a prefix: that makes no room
    with pytest.raises(BudgetError, match="33 neighbouring"):
        manager.take_pack([33], 1)
    assert num_passes == [1]
    held.close()
    manager.take_pack([33], 1)
    assert num_passes == [2]


@pytest.mark.parametrize("seed", range(40))
def test_each_run_is_the_cheapest_that_there_is_and_of_these_the_highest(seed: int):
    rng = Random(seed)
    num_pages = rng.choice((30, 300, 900))
    costs = [
        rng.choice((0, 0, 1, 1, 1, None)) if rng.random() < 0.3 else 1 for _ in range(num_pages)
    ]
    lengths = [rng.choice((0, 1, 3, 5, 8)) for _ in range(rng.randrange(1, 25))]
    search = RunSearch(
        bytes(cost == 0 for cost in costs), [page for page, cost in enumerate(costs) if cost == 1]
    )
    for run, length in zip(search.place(lengths), lengths, strict=False):
        assert len(run) == length
        if not length:
            continue
        found = [
            (sum(window), -start)
            for start in range(num_pages - length + 1)
            if None not in (window := costs[start : start + length])
        ]
        assert min(found) == (sum(costs[run.start : run.stop]), -run.start)
        costs[run.start : run.stop] = [None] * length
    if len(search.place(lengths)) < len(lengths):
        length = lengths[len(search.place(lengths))]
        assert all(None in costs[start : start + length] for start in range(num_pages - length + 1))


def test_a_packs_groups_go_back_as_it_moves_on():
    manager = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    pack = manager.take_pack(
        [2, 1, 3, 4], 2
    )  # workspace, a part below the trained ones, two trained parts
    cursor = Cursor(num_rows=4, num_trained=2, num_parts=2)
    held = []
    for move in (
        lambda: cursor.advance_forward(3),
        lambda: cursor.advance_forward(1),
        lambda: cursor.advance_loss(2),
        lambda: cursor.advance_backward(3),
        lambda: cursor.advance_backward(1),
        lambda: cursor.advance_backward(4),
    ):
        move()
        pack.follow(cursor)
        held.append(pack.num_pages)
        manager.check_integrity(set(), [pack])
    assert held == [10, 9, 9, 9, 5, 0]
    assert manager.pool.num_free == 20
