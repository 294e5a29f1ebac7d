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
    broker = PageManager(
        num_pages=num_pages, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    opened = []
    for number, num_blocks in enumerate(lengths):
        tokens = [number] * (num_blocks * BLOCK)
        sequence = broker.cache.open((), len(tokens))
        sequence.reserve(len(tokens))
        sequence.commit(len(tokens), tokens, PrefixOwner(""))
        opened.append(sequence)
    for sequence in opened:
        sequence.close()
    return broker


def known_blocks(broker: PageManager, number: int, num_blocks: int) -> int:
    """How many blocks of one of those prefixes are still known."""
    tokens = [number] * (num_blocks * BLOCK + 1)
    return len(
        broker.cache.prefixes.find(broker.cache.prefixes.keys(PrefixOwner(""), tokens), len(tokens))
    )


def test_a_run_of_neighbours_forgets_no_more_prefixes_than_lie_in_it():
    broker = broker_with_prefixes(20, [4, 4, 4, 4])
    assert (broker.pool.num_free, broker.num_available) == (4, 20)
    pack = broker.take_pack([6], 1)
    assert pack.runs == [range(14, 20)], "the free pages, and the two before them"
    assert [known_blocks(broker, number, 4) for number in range(4)] == [4, 4, 4, 2]
    pack.release()
    broker.check_integrity(set(), [])


def test_requests_and_packs_take_the_pages_of_optimizers_as_if_they_were_free():
    sent: list[Command] = []
    broker = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    for job, num_pages in (("first", 6), ("second", 3)):
        broker.place_optimizer(job, num_pages * PAGE_BYTES, num_pack_pages=4)
    assert broker.cache.optimizers.runs == {"first": range(14, 20), "second": range(11, 14)}
    assert sent == [PlaceOptimizer("first", 14, 6), PlaceOptimizer("second", 11, 3)]
    assert (broker.pool.num_free, broker.num_available) == (11, 20)
    pack = broker.take_pack([9, 4], 1)  # 11 pages are free: the youngest makes room
    assert broker.cache.optimizers.runs == {"first": range(14, 20)}
    assert sent[2:] == [PlaceOptimizer("second", 0, 0)]
    request = broker.cache.open((), 7 * BLOCK)
    request.reserve(7 * BLOCK)
    assert not broker.cache.optimizers.runs and sent[3:] == [PlaceOptimizer("first", 0, 0)]
    broker.check_integrity(set(request.pages), [pack])
    request.close()
    pack.release()
    assert broker.pool.num_free == 20


def test_optimizers_get_no_pages_that_others_would_take_at_once():
    broker = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    for num_pages, num_pack_pages in (
        (11, 0),
        (8, 13),
    ):  # more than half of the pool; too many beside a pack
        broker.place_optimizer("job", num_pages * PAGE_BYTES, num_pack_pages=num_pack_pages)
        assert not broker.cache.optimizers.runs
    broker.place_optimizer("job", 8 * PAGE_BYTES, num_pack_pages=12)
    broker.place_optimizer("other", 3 * PAGE_BYTES, num_pack_pages=0)
    assert broker.cache.optimizers.runs.keys() == {"job"}, "all of them have no more than half"


def test_the_device_hears_in_order_where_optimizers_lie():
    sent: list[Command] = []
    broker = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    for job in ("first", "second", "third"):
        broker.place_optimizer(job, 3 * PAGE_BYTES, num_pack_pages=0)
    assert sent == [
        PlaceOptimizer("first", 17, 3),
        PlaceOptimizer("second", 14, 3),
        PlaceOptimizer("third", 11, 3),
    ]
    broker.cache.optimizers.lend(1)
    broker.place_optimizer("fourth", 3 * PAGE_BYTES, num_pack_pages=0)
    told = [PlaceOptimizer("third", 0, 0), PlaceOptimizer("fourth", 11, 3)]
    assert sent[3:] == told, "what leaves pages comes before what takes some"
    broker.cache.optimizers.release("second")  # to the host, say: its own command says so
    broker.cache.optimizers.withdraw("third")
    assert len(sent) == 5, "nothing has changed for the device"


def test_the_device_hears_of_each_size_of_the_window():
    sent: list[Command] = []
    broker = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    broker.window.clear()
    assert not sent, "there is no window to end"
    pack = broker.take_pack([4], 1, WindowNeed(3, 8))
    assert sent[-1] == ResizeWindow(broker.window.run.start, len(broker.window.run))
    pack.release()
    broker.window.clear()
    assert sent[-1] == ResizeWindow(0, 0)
    broker.check_integrity(set(), [])


def test_moments_that_lie_in_the_way_of_their_own_pack_get_pages_with_it():
    sent: list[Command] = []
    broker = PageManager(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=sent.append)
    broker.place_optimizer("above", 6 * PAGE_BYTES, num_pack_pages=0)
    broker.place_optimizer("job", 3 * PAGE_BYTES, num_pack_pages=0, needs_pages=True)
    broker.cache.optimizers.release("above")
    assert dict(broker.cache.optimizers.runs) == {"job": range(11, 14)}
    sent.clear()
    broker.cache.optimizers.hold("job", is_held=True)
    with pytest.raises(BudgetError):
        broker.take_pack([12], 1)
    pack = broker.take_pack([12, 5], 1, moments=MomentsNeed("job", 3))
    (run,) = broker.cache.optimizers.runs.values()
    assert len(run) == 3 and not broker.pool.num_free
    assert sent == [PlaceOptimizer("job", 0, 0), PlaceOptimizer("job", run.start, 3)]
    broker.check_integrity(set(), [pack], ["job"])


def test_pages_that_are_held_are_nobody_elses():
    broker = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    for job in ("first", "second"):
        broker.place_optimizer(job, 5 * PAGE_BYTES, num_pack_pages=0, needs_pages=True)
    broker.cache.optimizers.hold("first", is_held=True)
    assert broker.num_available == 15
    with pytest.raises(BudgetError):
        broker.take_pack([16], 1)
    with pytest.raises(BudgetError):
        broker.cache.take(16)
    assert broker.cache.optimizers.runs.keys() == {"first", "second"}, "nothing is taken"
    broker.take_pack([15], 1).release()
    assert broker.cache.optimizers.runs.keys() == {"first"}
    broker.cache.optimizers.hold("first", is_held=False)
    assert len(broker.cache.take(20)) == 20


def test_a_run_that_cannot_be_had_forgets_nothing():
    broker = broker_with_prefixes(12, [3, 3])
    held = broker.cache.open((), BLOCK)
    held.reserve(
        BLOCK
    )  # the page after the prefixes: what is free or known is 6 pages before it, and 5 after it
    with pytest.raises(
        BudgetError, match="7 neighbouring pages asked for; 5 are free, 5 of them side by side"
    ):
        broker.take_pack([7], 1)
    with pytest.raises(BudgetError):
        broker.take_pack([5, 7], 1)
    assert (broker.pool.num_free, [known_blocks(broker, number, 3) for number in range(2)]) == (
        5,
        [3, 3],
    )
    broker.take_pack([6], 1)
    assert [known_blocks(broker, number, 3) for number in range(2)] == [0, 0]


def test_a_pack_that_fits_is_placed_however_prefixes_lie():
    """The free run in the middle suits the first group, and would leave no three neighbours for the
    last."""
    broker = broker_with_prefixes(10, [2, 4, 4])
    broker.cache.evict_pages(range(2, 6))
    pack = broker.take_pack([4, 3, 3], 1)
    assert pack.num_pages == 10
    pack.release()
    broker.check_integrity(set(), [])
    assert broker.pool.num_free == 10


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
    broker = broker_with_prefixes(400, [10] * 40)
    assert broker.pool.num_free == 0
    pack = broker.take_pack([9, *[6] * 33], 33)
    assert (num_passes, pack.num_pages) == ([1], 9 + 6 * 33)
    assert broker.num_available == 400 - pack.num_pages
    pack.release()
    broker.check_integrity(set(), [])


def test_what_cannot_be_had_is_not_looked_for_again_until_pages_have_changed(num_passes: list[int]):
    broker = broker_with_prefixes(40, [8, 8, 8, 8])
    held = broker.cache.open((), BLOCK)
    held.reserve(BLOCK)  # the page in the middle: 32 before it, 7 after it
    for _ in range(3):
        with pytest.raises(BudgetError, match="33 neighbouring pages asked for; 7 are free"):
            broker.take_pack([33], 1)
    assert num_passes == [1]
    held.reserve(9 * BLOCK)  # it takes what is free and evicts a prefix: that makes no room
    with pytest.raises(BudgetError, match="33 neighbouring"):
        broker.take_pack([33], 1)
    assert num_passes == [1]
    held.close()
    broker.take_pack([33], 1)
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
    broker = PageManager(
        num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK, send=list[object]().append
    )
    pack = broker.take_pack(
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
        broker.check_integrity(set(), [pack])
    assert held == [10, 9, 9, 9, 5, 0]
    assert broker.pool.num_free == 20
