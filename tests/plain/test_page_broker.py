"""Pages for packs: neighbours, and no more of the known prefixes forgotten than that takes."""

import pytest

from coserve.engine.page_broker import PageBroker
from coserve.errors import BudgetError
from coserve.tuning.cursor import Cursor

BLOCK, PAGE_BYTES = 4, 64


def broker_with_prefixes(num_pages: int, lengths: list[int]) -> PageBroker:
    """A pool in which requests with this many whole blocks each have been answered, one after another."""
    broker = PageBroker(num_pages=num_pages, page_bytes=PAGE_BYTES, block_tokens=BLOCK)
    opened = []
    for number, num_blocks in enumerate(lengths):
        tokens = [number] * (num_blocks * BLOCK)
        sequence = broker.cache.open((), len(tokens))
        sequence.reserve(len(tokens))
        sequence.commit(len(tokens), tokens, "")
        opened.append(sequence)
    for sequence in opened:
        sequence.close()
    return broker


def known_blocks(broker: PageBroker, number: int, num_blocks: int) -> int:
    """How many blocks of one of those prefixes are still known."""
    tokens = [number] * (num_blocks * BLOCK + 1)
    return len(broker.cache.prefixes.find(broker.cache.prefixes.keys("", tokens), len(tokens)))


def test_a_run_of_neighbours_forgets_no_more_prefixes_than_lie_in_it():
    broker = broker_with_prefixes(20, [4, 4, 4, 4])
    assert (broker.pool.num_free, broker.num_available) == (4, 20)
    pack = broker.take_pack([6], 1)
    assert pack.runs == [range(14, 20)], "the free pages, and the two before them"
    assert [known_blocks(broker, number, 4) for number in range(4)] == [4, 4, 4, 2]
    pack.release()
    broker.check_integrity(set(), [])


def test_a_run_that_cannot_be_had_forgets_nothing():
    broker = broker_with_prefixes(12, [3, 3])
    held = broker.cache.open((), BLOCK)
    held.reserve(BLOCK)  # the page after the prefixes: what is free or known is 6 pages before it, and 5 after it
    with pytest.raises(BudgetError, match="7 neighbouring pages asked for; 5 are free, 5 of them side by side"):
        broker.take_pack([7], 1)
    with pytest.raises(BudgetError):
        broker.take_pack([5, 7], 1)
    assert (broker.pool.num_free, [known_blocks(broker, number, 3) for number in range(2)]) == (5, [3, 3])
    broker.take_pack([6], 1)
    assert [known_blocks(broker, number, 3) for number in range(2)] == [0, 0]


def test_a_pack_that_fits_is_placed_however_prefixes_lie():
    """The free run in the middle suits the first group, and would leave no three neighbours for the last."""
    broker = broker_with_prefixes(10, [2, 4, 4])
    broker.cache.evict_pages(range(2, 6))
    pack = broker.take_pack([4, 3, 3], 1)
    assert pack.num_pages == 10
    pack.release()
    broker.check_integrity(set(), [])
    assert broker.pool.num_free == 10


def test_a_packs_groups_go_back_as_it_moves_on():
    broker = PageBroker(num_pages=20, page_bytes=PAGE_BYTES, block_tokens=BLOCK)
    pack = broker.take_pack([2, 1, 3, 4], 2)  # workspace, a part below the trained ones, two trained parts
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
